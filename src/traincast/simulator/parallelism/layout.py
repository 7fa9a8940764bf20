"""How a model is distributed over GPUs: which dimension each group of ranks shares, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from traincast.hardware.device import Device
from traincast.models.transformers.description import Transformer
from traincast.utils.errors import TraincastError, make_unknown_error

SHARDINGS = ("none", "zero1", "zero2", "zero3")
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
CHECKPOINTS = ("none", "light", "selective", "full", "whole")
WHOLE = ("full", "whole")
"""Those of `CHECKPOINTS` that keep the input of a layer only."""
TENSOR_OVERLAPS = ("none", "backward", "all")
LAUNCHES = ("eager", "fused", "compiled", "graph")
PYTORCH = ("eager", "compiled")
"""Those of `LAUNCHES` that are PyTorch's own, not a vendor's."""
ATTENTIONS = ("flash", "flash2", "triton", "unfused")
DISPATCHES = ("each", "once")
GRAPHED = ("attention", "router", "feed_forward", "mamba")
"""Modules that Transformer Engine captures as CUDA graphs of their own."""
SCALINGS = ("tensor", "row", "block", "mx")
ADAPTERS = ("attention", "all")
OPTIMIZERS = ("adam", "adam-foreach", "adam-loop", "none")
EXCHANGES = ("ring", "gather", "all-to-all")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
MAX_GPUS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A step of `global_batch` samples on `gpus` GPUs, `micro_batch` at a time.

    `tp` ranks share every matrix, with `sequence` the tokens in between as well; `pp` stages of `vp` chunks each share
    the layers under a `schedule`; `cp` ranks share the tokens of a sample: keys and values go round a "ring" or are
    gathered ("gather"), or ranks swap tokens for heads ("all-to-all"); `ep` ranks share the experts, `etp` of them a
    single one. The rest is data parallel.

    `sharding` says what data-parallel ranks share: nothing, the optimizer ("zero1": a distributed optimizer), also
    gradients ("zero2"), also parameters ("zero3": FSDP), in groups of `shard_group` ranks (0: all of them; fewer is
    hybrid sharding). `reshard`: gathered parameters are given back after the forward pass; pipelines keep them for the
    whole step (`gathers_once`). `reduce_bytes` and `gather_bytes` are the sizes of an element of gradients and of
    parameters on the wire.

    `scaling` is what an 8-bit scale belongs to: a whole "tensor", a "row", a "block" of 128 or ("mx") 32 elements;
    `wide_gradients`: gradients of weights are made in 16 bits nevertheless. `quantised_gather` and `quantised_tokens`
    gather parameters, and tokens of tensor-parallel ranks, in eight bits.

    `bucket_mb` is the size of gradients that are reduced together, MiB (0: Megatron's). `stage_layers` are the
    layers of each stage (empty: as even as they go). The first `frozen_layers` and the table of words are not
    trained; with `adapter_rank` only low-rank adapters of projections are: those of "attention", or "all".
    `document_len` tokens of a sample see each other (0: all of them): samples are packed from documents of that length.

    `checkpoint` is what backward computes again: "none", "light" (norms and activations), "selective" (as torchtitan:
    also every second product), "full", or "whole" (as PyTorch before 2.1, which also ran what backward does not read);
    where `checkpoint_every` is n, in every n-th layer only; where
    `checkpoint_layers` is n, in the first n layers of every stage (or chunk of one) only. `kernels` is who launches
    them: PyTorch op by op ("eager"), Megatron's and Transformer Engine's modules ("fused"), a compiler, or one CUDA
    graph; modules in `graphed` are CUDA graphs of their own between others that the host launches. `joined`: query, key
    and value are one GEMM, and so are gate and up (None: as a vendor's modules do, and PyTorch's models do not).
    `dropout`: after embedding, attention and both projections. `autocast`: weights are in fp32 and cast for 16-bit
    GEMMs, as PyTorch's autocast does it. `optimizer` is "adam" (one fused kernel), "adam-foreach", "adam-loop" (see
    `write_update`) or "none". `overlap_*` lets collectives of gradients, of parameters, of expert-parallel ranks and of
    stages run alongside kernels; those of tensor-parallel ranks "none" of the time, in the "backward" pass (as Megatron
    does) or in "all" GEMMs. `dispatch` sends a token to "each" of its experts, or "once" to every node (DeepEP).
    `expert_imbalance` is how many times the even share of tokens the rank with the busiest experts gets.

    What saves memory: `optimizer_state` is the type of the optimizer's moments ("fp32", with fp32 copies of 16-bit
    weights; "bf16" or "int8", without); `frozen_type` that of weights below adapters ("": as computed with, or "nf4");
    `offload` is kept in host memory ("parameters", "optimizer", "activations"); `update_in_backward`: every gradient
    updates its weight at once and goes; `loss` is "" (of all logits, made as the layers are), "eager" (op by op in fp32
    though layers are compiled), "chunked" (of an eighth of them at a time) or "fused" (logits themselves are made an
    eighth at a time, as Liger does).
    """

    gpus: int
    micro_batch: int = 1
    global_batch: int = 0
    seq_len: int = 0
    tp: int = 1
    sequence: bool = True
    pp: int = 1
    vp: int = 1
    schedule: str = "1f1b"
    cp: int = 1
    cp_exchange: str = "ring"
    ep: int = 1
    etp: int = 1
    sharding: str = "none"
    shard_group: int = 0
    reshard: bool = True
    reduce_bytes: int = 4
    gather_bytes: int = 2
    checkpoint: str = "none"
    checkpoint_every: int = 1
    checkpoint_layers: int = 0
    kernels: str = "fused"
    graphed: tuple[str, ...] = ()
    joined: bool | None = None
    attention: str = "flash"
    dropout: bool = False
    autocast: bool = False
    precision: str = "bf16"
    scaling: str = "tensor"
    wide_gradients: bool = False
    quantised_gather: bool = False
    quantised_tokens: bool = False
    optimizer: str = "adam"
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tp: str = "backward"
    overlap_ep: bool = False
    dispatch: str = "each"
    expert_imbalance: float = 1.0
    overlap_pp: bool = True
    adapter_rank: int = 0
    adapters: str = "attention"
    frozen_layers: int = 0
    document_len: int = 0
    stage_layers: tuple[int, ...] = ()
    optimizer_state: str = "fp32"
    frozen_type: str = ""
    offload: tuple[str, ...] = ()
    update_in_backward: bool = False
    loss: str = ""
    bucket_mb: float = 0.0

    @property
    def wide(self) -> bool:
        """Whether weights and what stands between layers are in fp32."""
        return self.autocast or self.precision in ("fp32", "tf32")

    @property
    def dp(self) -> int:
        """Data-parallel ranks: copies of the model (its pieces counted once)."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def sharing(self) -> int:
        """Ranks that share optimizer, gradients or parameters; those of a sample's parts hold the same weights."""
        return min(self.shard_group or self.dp * self.cp, self.dp * self.cp)

    def recomputes(self, number: int, place: int) -> bool:
        """Whether backward computes layer `number` again, which is at this `place` of its stage or chunk."""
        within = not self.checkpoint_layers or place < self.checkpoint_layers
        return self.checkpoint != "none" and number % self.checkpoint_every == 0 and within

    @property
    def gathers_once(self) -> bool:
        """Whether sharded parameters are gathered, and gradients reduced, once per step: PyTorch's pipelines do not
        shard again between micro-batches."""
        return self.sharding == "zero3" and self.pp > 1

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on every pipeline."""
        return self.global_batch // (self.dp * self.micro_batch)

    def described(self) -> str:
        """The layout in a few words."""
        parts = [f"{name} {value}" for name, value in self._degrees() if value > 1]
        words = {"none": "", "zero1": "distributed optimizer", "zero2": "ZeRO-2", "zero3": "FSDP"}[self.sharding]
        again = f"every {self.checkpoint_every}th layer" if self.checkpoint_every > 1 else self.checkpoint
        again += f" in {self.checkpoint_layers} layers per stage" if self.checkpoint_layers else ""
        parts += [words] if words else []
        parts += [f"recompute {again}"] if self.checkpoint != "none" else []
        return ", ".join([*parts, f"{self.accumulation} x micro-batch {self.micro_batch}"])

    def _degrees(self) -> tuple[tuple[str, int], ...]:
        return (
            ("tp", self.tp), ("pp", self.pp), ("vp", self.vp), ("cp", self.cp), ("ep", self.ep), ("dp", self.dp),
        )  # fmt: skip


def complete_layout(layout: Layout, model: Transformer) -> Layout:
    """The layout with what was left out filled in, once it has been checked; rejections name two numbers that clash."""
    for what, name, known in (
        ("sharding", layout.sharding, SHARDINGS),
        ("schedule", layout.schedule, SCHEDULES),
        ("checkpointing", layout.checkpoint, CHECKPOINTS),
        ("way to launch kernels", layout.kernels, LAUNCHES),
        ("precision", layout.precision, PRECISIONS),
        ("attention", layout.attention, ATTENTIONS),
        ("way to send tokens to experts", layout.dispatch, DISPATCHES),
        ("exchange between ranks of a sample", layout.cp_exchange, EXCHANGES),
        ("scaling of 8-bit GEMMs", layout.scaling, SCALINGS),
        ("optimizer", layout.optimizer, OPTIMIZERS),
        ("projections with adapters", layout.adapters, ADAPTERS),
        ("overlap of tensor-parallel collectives", layout.overlap_tp, TENSOR_OVERLAPS),
    ):
        if name not in known:
            raise make_unknown_error(what, name, known, f"Choose from {', '.join(known)}.")
    _check_graphed(layout)
    _check_counts(layout)
    layout = replace(layout, seq_len=layout.seq_len or model.seq_len)
    if layout.precision in ("fp32", "tf32"):
        layout = replace(layout, gather_bytes=4, reduce_bytes=4)
    if layout.joined is None:
        layout = replace(layout, joined=layout.kernels not in PYTORCH)
    if layout.gathers_once:
        layout = replace(layout, reshard=False)
    if layout.vp > 1 and layout.schedule == "1f1b":
        layout = replace(layout, schedule="interleaved")
    _check_model(layout, model)
    _check_ranks(layout, model)
    _check_stages(layout, model)
    _check_trained(layout, model)
    if not layout.global_batch:
        layout = replace(
            layout, global_batch=layout.dp * layout.micro_batch * max(1, 2 * layout.pp if layout.pp > 1 else 1)
        )
    _check_batch(layout)
    return layout


def check_arithmetic_units(precision: str, device: Device) -> None:
    """Rejects 8- and 4-bit arithmetic on a device without units for it: no program runs there, so it has no time."""
    having = {"fp8": "h100, b200, mi300x", "fp4": "b200, gb300, mi355x"}.get(precision)
    if having and precision not in device.peak_flops:
        known = ", ".join(name for name in ("fp8", "bf16", "fp16") if name in device.peak_flops) or "fp32"
        raise TraincastError(
            f"{device.key} has no {precision} units, so nothing runs in {precision} there; give `dtype` {known}, or a "
            f"GPU that has them ({having})"
        )


def _check_graphed(layout: Layout) -> None:
    for name in layout.graphed:
        if name not in GRAPHED:
            raise make_unknown_error("module of a CUDA graph", name, GRAPHED, f"Choose from {', '.join(GRAPHED)}.")
    if layout.graphed and layout.kernels != "fused":
        raise TraincastError(
            f"CUDA graphs of single modules are a vendor's, and kernels are {layout.kernels}; give fused, or graph for "
            "all modules"
        )


def _check_counts(layout: Layout) -> None:
    counts = ("gpus", "micro_batch", "tp", "pp", "vp", "cp", "ep", "etp", "checkpoint_every")
    for name in counts:
        value = getattr(layout, name)
        if not 1 <= value <= MAX_GPUS:
            raise TraincastError(f"{name.replace('_', '-')} {value} is out of range; give 1 to {MAX_GPUS}")
    if not 1.0 <= layout.expert_imbalance <= MAX_GPUS:
        raise TraincastError(f"expert-imbalance {layout.expert_imbalance:g} is out of range; give 1 (even) or more")
    for name in (
        "global_batch",
        "seq_len",
        "checkpoint_layers",
        "shard_group",
        "adapter_rank",
        "frozen_layers",
        "document_len",
    ):
        if not 0 <= getattr(layout, name) <= MAX_GPUS * 64:
            raise TraincastError(f"{name.replace('_', '-')} {getattr(layout, name)} is out of range; give more than 0")


def _check_model(layout: Layout, model: Transformer) -> None:
    """What the model's own numbers allow."""
    _check_divides("tp", layout.tp, "attention heads", model.heads, model.name)
    if model.latent is None and layout.tp > model.kv_heads:
        _check_divides("key-value heads", model.kv_heads, "tp", layout.tp, model.name)
    _check_divides("tp", layout.tp, "feed-forward width", model.ffn, model.name)
    if layout.pp * layout.vp > model.layers:
        most = model.layers // layout.vp
        raise TraincastError(
            f"pp {layout.pp} x vp {layout.vp} are more stages than the {model.layers} layers of {model.name}; "
            f"give pp {max(1, most)} or fewer"
        )
    if layout.cp > 1 and layout.seq_len % (2 * layout.cp):
        near = _format_nearest(range(1, layout.seq_len // 2 + 1), layout.cp, lambda n: layout.seq_len % (2 * n) == 0)
        raise TraincastError(f"cp {layout.cp} does not divide {layout.seq_len} tokens into halves; give {near}")
    if layout.cp > 1 and layout.cp_exchange == "all-to-all":
        heads = max(1, (model.heads if model.latent is not None else model.kv_heads) // layout.tp)
        _check_divides("cp", layout.cp, "key-value heads of a rank", heads, f"{model.name}, exchanged all-to-all")
    if layout.ep > 1 and model.experts is None:
        raise TraincastError(f"ep {layout.ep} needs experts, and {model.name} has 0; leave it out")
    if layout.expert_imbalance > 1 and (model.experts is None or layout.ep == 1):
        raise TraincastError(
            f"expert-imbalance {layout.expert_imbalance:g} is of ranks that share experts, and ep is {layout.ep} of "
            f"{model.name}; give ep 2 or more, or leave it out"
        )
    if model.experts is not None:
        _check_divides("ep", layout.ep, "experts", model.experts.count, model.name)


def _check_ranks(layout: Layout, model: Transformer) -> None:
    """What the number of GPUs allows."""
    block = layout.tp * layout.pp * layout.cp
    if layout.gpus % block:
        below = max(block, layout.gpus // block * block)
        raise TraincastError(
            f"{layout.gpus} GPUs are no multiple of tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {block}; "
            f"give {below} or {below + block} GPUs"
        )
    per_stage = layout.gpus // layout.pp
    if layout.ep * layout.etp > per_stage or per_stage % (layout.ep * layout.etp):
        near = _format_nearest(range(1, per_stage + 1), layout.ep, lambda n: per_stage % (n * layout.etp) == 0)
        raise TraincastError(
            f"ep {layout.ep} does not divide the {per_stage} GPUs of a stage of {model.name}; give {near}"
        )
    if layout.shard_group and (layout.dp * layout.cp) % layout.shard_group:
        shared = layout.dp * layout.cp
        near = _format_nearest(range(1, shared + 1), layout.shard_group, lambda n: shared % n == 0)
        raise TraincastError(f"groups of {layout.shard_group} do not divide {shared} data-parallel ranks; give {near}")


def _check_stages(layout: Layout, model: Transformer) -> None:
    """Stages that are told one by one."""
    stages = layout.stage_layers
    if not stages:
        return
    if len(stages) != layout.pp or sum(stages) != model.layers or min(stages) < 0:
        raise TraincastError(
            f"stages of {', '.join(map(str, stages))} layers are {len(stages)} with {sum(stages)} layers; {model.name} "
            f"has {model.layers} on pp {layout.pp}: give {layout.pp} numbers that add up to {model.layers}"
        )
    if layout.vp > 1:
        raise TraincastError(
            f"stages told one by one have one chunk each, and vp is {layout.vp}; leave one of them out"
        )


def _check_trained(layout: Layout, model: Transformer) -> None:
    """What is frozen, and documents inside samples."""
    if layout.frozen_layers >= model.layers:
        raise TraincastError(
            f"{layout.frozen_layers} frozen layers leave none of the {model.layers} of {model.name} to train; give "
            f"{model.layers - 1} or fewer"
        )
    if layout.frozen_layers and layout.adapter_rank:
        raise TraincastError(
            f"adapters of rank {layout.adapter_rank} freeze the whole model, and {layout.frozen_layers} layers are to "
            "be frozen; give one of them"
        )
    if layout.autocast and (layout.kernels != "eager" or layout.precision not in ("fp16", "bf16")):
        raise TraincastError(
            f"autocast is for 16-bit GEMMs that PyTorch launches op by op, not for {layout.precision} and "
            f"{layout.kernels} kernels; give bf16 and eager, or leave it out"
        )
    if layout.autocast and model.experts is not None:
        raise TraincastError(f"autocast of the experts of {model.name} is not known; leave it out")
    if layout.document_len and layout.seq_len % layout.document_len:
        near = _format_nearest(range(1, layout.seq_len + 1), layout.document_len, lambda n: layout.seq_len % n == 0)
        raise TraincastError(
            f"documents of {layout.document_len} tokens do not divide samples of {layout.seq_len}; give {near}"
        )
    if layout.document_len and layout.cp > 1:
        raise TraincastError(f"documents of {layout.document_len} tokens are not split over cp {layout.cp}; give cp 1")
    if layout.cp > 1 and layout.attention == "unfused":
        raise TraincastError(
            f"cp {layout.cp} needs fused attention, whose kernels meet the keys of others; give attention sdpa or cp 1"
        )


def _check_batch(layout: Layout) -> None:
    share = layout.dp * layout.micro_batch
    if layout.global_batch % share or not layout.global_batch:
        below = layout.global_batch // share * share
        choices = f"{below} or {below + share}" if below else str(share)
        raise TraincastError(
            f"a global batch of {layout.global_batch} is no multiple of dp {layout.dp} x micro-batch "
            f"{layout.micro_batch} = {share}; give {choices}"
        )
    if layout.vp > 1 and layout.accumulation % layout.pp:
        step = share * layout.pp
        below = layout.global_batch // step * step
        choices = f"{below} or {below + step}" if below else str(step)
        raise TraincastError(
            f"interleaved stages need micro-batches in multiples of pp {layout.pp}, and there are "
            f"{layout.accumulation}; give a global batch of {choices}"
        )


def _check_divides(what: str, part: int, of: str, whole: int, name: str) -> None:
    if whole % part:
        near = _format_nearest(range(1, whole + 1), part, lambda n: whole % n == 0)
        raise TraincastError(f"{what} {part} does not divide the {whole} {of} of {name}; give {near}")


def _format_nearest(choices: Iterable[int], wanted: int, works: object) -> str:
    """The nearest numbers below and above that work."""
    assert callable(works)
    fits = [n for n in choices if works(n)]
    below, above = [n for n in fits if n < wanted], [n for n in fits if n > wanted]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1])) or "1"
