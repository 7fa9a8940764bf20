"""The scenario: everything that can be asked about one training step, declared once, each field with its kind, range
and words.

Command-line options, help, completion, server fields, OpenAPI, Python keywords, what-if and sweep axes, scenario files
and the reference page are all derived from the fields of `Scenario` (see `fields`).
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from traincast.ir.workload import MAX_BATCH, MAX_SEQ_LEN
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

GROUPS = {
    "source": "what is trained",
    "hardware": "hardware",
    "sizes": "sizes",
    "numerics": "numerics",
    "program": "program",
    "parallelism": "parallelism",
    "memory": "memory",
    "tables": "embedding tables",
    "host": "host",
    "loader": "data loader",
    "costs": "costs",
}
"""Groups of fields and their titles, in the order of the declaration."""
LAWS = ("slower", "faster", "same time", "more memory", "less memory")
"""What a larger value, a later choice or a flag may make of a step, or leave as it is: never the opposite."""
_MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One field of a scenario. `kind` is "integer", "number", "flag", "choice" or "text"; `least` and `most` are the
    limits of numbers; `default` says what stands for a value that is not given, `laws` are of `LAWS`. `option` is that
    of the command line, `described` the help with unit and default."""

    name: str
    option: str
    kind: str
    group: str
    help: str
    described: str
    unit: str
    default: str
    choices: tuple[Any, ...]
    least: float
    most: float
    needs: tuple[str, ...]
    is_file: bool
    laws: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What a form calls it: `Batch size`."""
        words = self.name.replace("_", " ")
        return "GPUs" if words == "gpus" else words.capitalize() if len(words) > 3 else words.upper()

    def check(self, value: Any) -> None:
        """Rejects a value that the field cannot have."""
        if self.kind == "choice":
            if isinstance(value, bool) or value not in self.choices:
                names = [str(choice) for choice in self.choices]
                raise make_unknown_error(self.name, str(value)[:80], names, f"Choose from {', '.join(names)}.")
        elif self.kind == "flag":
            if not isinstance(value, bool):
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give true or false")
        elif self.kind in ("integer", "number"):
            kinds = int if self.kind == "integer" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                a = "an integer" if self.kind == "integer" else "a number"
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give {a}, {self.limits}")
            if not self.least <= value <= self.most:
                shown_value = str(value) if isinstance(value, int) else f"{value:g}"
                raise TraincastError(f"`{self.name}` {shown_value} is out of range; give {self.limits}")

    @property
    def limits(self) -> str:
        """The range of a number in words."""
        return f"{self.least:.20g} to {self.most:.20g} {self.unit}".rstrip()

    def parse(self, text: str) -> Any:
        """The value that a text stands for."""
        value: Any = text.strip()
        if self.kind == "flag":
            if value not in ("0", "1", "true", "false"):
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give 1 or 0")
            return value in ("1", "true")
        if self.kind == "integer" or (self.kind == "choice" and isinstance(self.choices[0], int)):
            plain = value.replace("_", "")
            if not (plain.isascii() and plain.isdecimal() and len(plain) <= _MOST_DIGITS):
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give an integer, {self.limits}")
            value = int(plain)
        elif self.kind == "number":
            try:
                value = float(value)
            except ValueError:
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give a number, {self.limits}") from None
        self.check(value)
        return value


def make_field_info(name: str, hint: Any) -> FieldInfo:
    """A field from its annotation."""
    declared = hint if typing.get_origin(hint) is Annotated else typing.get_args(hint)[0]
    kind, meta = typing.get_args(declared)
    assert isinstance(meta, msgspec.Meta) and meta.extra is not None
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    extra, words = meta.extra, str(meta.description)
    known = [f"in {extra['unit']}"] if extra["unit"] and extra["unit"] not in words else []
    known += [f"default {extra['default']}"] if extra["default"] else []
    return FieldInfo(
        name=name, option="--" + name.replace("_", "-"),
        kind="choice" if choices else {int: "integer", float: "number", bool: "flag"}.get(kind, "text"),
        group=extra["group"], help=words, described=f"{words} ({'; '.join(known)})" if known else words,
        unit=extra["unit"], default=extra["default"], choices=choices, least=-math.inf if meta.ge is None else meta.ge,
        most=math.inf if meta.le is None else meta.le, needs=extra["needs"], is_file=extra["file"],
        laws=tuple(law for law in extra["law"].split(", ") if law),
    )  # fmt: skip


if TYPE_CHECKING:
    from collections.abc import Sequence

    from traincast.costs.host.profile import HostProfile
    from traincast.hardware.platform import Platform
    from traincast.ir.formula import OpCost
    from traincast.ir.workload import Workload
    from traincast.models.transformers.description import Transformer

    Source = str | Path | Workload | Transformer
    On = str | Platform
    Host = str | HostProfile
    Costs = str | Path | Sequence[OpCost]
    PlanText = str | Path
else:  # as text, which is all that command lines, files and servers have
    Source = On = Host = Costs = PlanText = str

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
Mode = Literal["training", "inference"]
Optimizer = Literal["none", "sgd", "adagrad", "adam"]
Attention = Literal["eager", "sdpa"]
Embedding = Literal["batched", "bag", "fbgemm"]
Kernels = Literal["eager", "fused", "compiled", "graph"]
ProgramName = Literal["torchrec", "torchrec-pipelined", "hugectr", "nvidia"]
Checkpoint = Literal["none", "light", "selective", "full"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
OptimizerState = Literal["fp32", "bf16", "int8"]
MAX_RANKS = 1 << 20
"""The most GPUs of a step, and the largest degree of any kind of parallelism."""


def _describe(
    group: str, help: str, *, least: float | None = None, most: float | None = None, unit: str = "",
    default: str = "", needs: tuple[str, ...] = (), file: bool = False, law: str = ""
) -> Meta:  # fmt: skip
    """What is known of a field: its group, help, range and unit; `default` is what stands for it where it is not given,
    `needs` are fields of which one must be given too, `file` says that it names a file. `law` is what a larger value, a
    later choice or a flag makes of a step (`field_info.LAWS`; "": a trade)."""
    extra = {"group": group, "unit": unit, "default": default, "needs": needs, "file": file, "law": law}
    return Meta(description=help, ge=least, le=most, extra=extra)


def _count(group: str, help: str, *, most: int = MAX_RANKS, **known: Any) -> Meta:
    return _describe(group, help, least=1, most=most, **known)


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step and where it runs. A field that is None (or False) was not given; its default is in its metadata.

    A workload is a built-in model by name, a saved workload (`.tc`), a DLRM or Transformer described in a file, a set
    of embedding tables, or one of these as an object. A platform is a built-in GPU or node, a description (`.toml`,
    `.yaml`), "here" (the machine at hand), or a `Platform`.
    """

    # fmt: off
    workload: Annotated[Source, _describe("source", "what is trained: a model by name, a file, or an object")] = ""
    on: Annotated[On, _describe("hardware", "a GPU or node by name, a description (.toml), or 'here'")] = ""
    gpus: Annotated[int, _count("hardware", "how many GPUs", default="1")] | None = None
    clock_mhz: Annotated[float, _describe(
        "hardware", "the SM clock, locked", least=1, most=1e5, unit="MHz", default="the GPU's own", law="faster"
    )] | None = None
    power_limit_w: Annotated[float, _describe(
        "hardware", "the power limit of a board", least=1, most=1e5, unit="W", default="the GPU's own", law="faster"
    )] | None = None

    batch_size: Annotated[int, _count(
        "sizes", "samples per GPU", most=MAX_BATCH, unit="samples", default="the model's own",
        law="slower, more memory"
    )] | None = None
    seq_len: Annotated[int, _count(
        "sizes", "tokens per sample", most=MAX_SEQ_LEN, unit="tokens", default="the model's own",
        law="slower, more memory"
    )] | None = None
    micro_batch: Annotated[int, _count(
        "sizes", "samples of a micro-batch", most=MAX_BATCH, unit="samples", default="batch_size", law="more memory"
    )] | None = None
    global_batch: Annotated[int, _count(
        "sizes", "samples of a step, all GPUs together", most=1 << 40, unit="samples",
        default="a micro-batch per rank", law="slower"
    )] | None = None

    dtype: Annotated[Dtype, _describe(
        "numerics", "arithmetic; of a set of tables, their type",
        default="fp32; bf16 of described Transformers; of tables as they say"
    )] | None = None
    fp8_scaling: Annotated[Literal["tensor", "row", "block", "mx"], _describe(
        "numerics", "what an 8-bit scale belongs to", default="tensor", needs=("dtype",)
    )] | None = None
    fp8_gather: Annotated[bool, _describe(
        "numerics", "FSDP gathers parameters in eight bits", needs=("fsdp", "zero"), law="faster"
    )] = False

    autocast: Annotated[bool, _describe(
        "numerics", "weights in fp32, cast for 16-bit GEMMs as torch.autocast does",
        default="off: weights in the type of `dtype`"
    )] = False

    mode: Annotated[Mode, _describe(
        "program", "training, or inference alone", default="training", law="faster, less memory"
    )] | None = None
    optimizer: Annotated[Optimizer, _describe(
        "program", "the optimizer; none leaves its step out", default="the model's own", law="slower, more memory"
    )] | None = None
    optimizer_impl: Annotated[Literal["fused", "foreach", "loop"], _describe(
        "program", "how PyTorch runs Adam: one kernel, lists of tensors, tensor by tensor", default="fused",
        law="slower"
    )] | None = None
    dropout: Annotated[bool, _describe(
        "program", "dropout after embedding, attention and both projections of a layer", default="off",
        law="slower, more memory"
    )] = False
    attention: Annotated[Attention, _describe(
        "program", "attention of Transformers: op by op, or one fused kernel",
        default="eager; sdpa of described Transformers", law="faster, less memory"
    )] | None = None
    embedding: Annotated[Embedding, _describe(
        "program", "how a DLRM looks up its tables", default="the model's own"
    )] | None = None
    kernels: Annotated[Kernels, _describe(
        "program", "who launches kernels: PyTorch op by op, fused modules, torch.compile, a CUDA graph",
        default="eager"
    )] | None = None
    compiled: Annotated[bool, _describe(
        "program", "as torch.compile(model) runs it: kernels compiled", law="faster"
    )] = False
    cuda_graph: Annotated[bool, _describe("program", "the step replayed as CUDA graphs", law="faster")] = False
    program: Annotated[ProgramName, _describe(
        "program", "what trains a DLRM on several GPUs", default="torchrec"
    )] | None = None
    checkpoint: Annotated[Checkpoint, _describe(
        "program", "what backward computes again", default="none", law="slower, less memory"
    )] | None = None
    checkpoint_every: Annotated[int, _count(
        "program", "recompute every n-th layer only", default="1", needs=("checkpoint",), law="faster, more memory"
    )] | None = None
    checkpoint_layers: Annotated[int, _count(
        "program", "recompute the first n layers per stage", default="all", needs=("checkpoint",),
        law="slower, less memory"
    )] | None = None

    tp: Annotated[int, _count(
        "parallelism", "tensor-parallel ranks: they share every matrix", default="1", law="less memory"
    )] | None = None
    pp: Annotated[int, _count("parallelism", "pipeline stages", default="1")] | None = None
    vp: Annotated[int, _count(
        "parallelism", "chunks of layers per stage (interleaved schedule)", default="1", needs=("pp",)
    )] | None = None
    cp: Annotated[int, _count("parallelism", "ranks that share the tokens of a sample", default="1")] | None = None
    ep: Annotated[int, _count("parallelism", "ranks that share the experts", default="1")] | None = None
    etp: Annotated[int, _count("parallelism", "ranks that share one expert", default="1")] | None = None
    expert_imbalance: Annotated[float, _describe(
        "parallelism", "tokens of the rank with the busiest experts, times its even share", least=1.0, most=1e6,
        default="1", needs=("ep",), law="slower"
    )] | None = None
    fsdp: Annotated[Literal[1, 2], _describe("parallelism", "fully sharded data parallel", default="off")] | None = None
    zero: Annotated[Literal[1, 2, 3], _describe(
        "parallelism", "data-parallel ranks share the optimizer (1), gradients (2), all (3)", default="off",
        law="less memory"
    )] | None = None
    shard_group: Annotated[int, _count(
        "parallelism", "ranks that share parameters (hybrid sharding)", default="all", needs=("fsdp", "zero"),
        law="less memory"
    )] | None = None
    no_reshard: Annotated[bool, _describe(
        "parallelism", "keep gathered parameters for the backward pass", needs=("fsdp", "zero"),
        law="faster, more memory"
    )] = False
    no_sequence_parallel: Annotated[bool, _describe(
        "parallelism", "tensor parallel without sharing tokens", needs=("tp",), law="more memory"
    )] = False
    schedule: Annotated[Schedule, _describe(
        "parallelism", "schedule of pipeline stages", default="1f1b", needs=("pp",)
    )] | None = None
    stage_layers: Annotated[str, _describe(
        "parallelism", "layers of each stage: 15,16,16,15", default="even", needs=("pp",)
    )] | None = None
    cp_exchange: Annotated[Literal["ring", "gather", "all-to-all"], _describe(
        "parallelism", "how attention meets other ranks' tokens (all-to-all: Ulysses)", default="ring", needs=("cp",)
    )] | None = None
    dispatch: Annotated[Literal["each", "once"], _describe(
        "parallelism", "tokens go to each expert, or once to each node (DeepEP)", default="each", needs=("ep",)
    )] | None = None
    graph_modules: Annotated[str, _describe(
        "parallelism", "modules that are CUDA graphs between others: attention,router,feed_forward", default="none"
    )] | None = None
    overlap: Annotated[str, _describe(
        "parallelism", "communication that overlaps kernels: gradients,parameters,tp,experts,stages, or none",
        default="gradients,parameters,stages, and tp in the backward pass"
    )] | None = None
    no_overlap: Annotated[bool, _describe("parallelism", "no communication overlaps kernels", law="slower")] = False
    lora_rank: Annotated[int, _count(
        "parallelism", "train low-rank adapters of this rank; the model is frozen", default="off",
        law="slower, more memory"
    )] | None = None
    lora_targets: Annotated[Literal["attention", "all"], _describe(
        "parallelism", "projections that have adapters", default="attention", needs=("lora_rank",)
    )] | None = None
    frozen_layers: Annotated[int, _count(
        "parallelism", "the first n layers and the token embedding are not trained", default="0",
        law="faster, less memory"
    )] | None = None
    document_len: Annotated[int, _count(
        "parallelism", "tokens of the documents that samples are packed from", unit="tokens", default="seq_len",
        law="slower"
    )] | None = None

    allocator: Annotated[str, _describe(
        "memory", "PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True", default="PyTorch's own",
        law="same time"
    )] | None = None
    optimizer_state: Annotated[OptimizerState, _describe(
        "memory", "type of the optimizer's moments; but for fp32, without fp32 copies of weights", default="fp32",
        law="less memory"
    )] | None = None
    lora_base: Annotated[Literal["nf4"], _describe(
        "memory", "type of frozen weights below adapters (QLoRA)", default="as dtype", needs=("lora_rank",),
        law="same time, less memory"
    )] | None = None
    offload: Annotated[str, _describe(
        "memory", "in host memory: parameters,optimizer,activations (only captures' activations take time)",
        default="nothing", law="less memory"
    )] | None = None
    loss: Annotated[Literal["eager", "chunked", "fused"], _describe(
        "memory", "not compiled; in chunks; or with logits in chunks (Liger): timed as the plain loss",
        default="as the layers", law="same time"
    )] | None = None
    update_in_backward: Annotated[bool, _describe(
        "memory", "gradients update weights in backward, and go", law="less memory"
    )] = False

    plan: Annotated[PlanText, _describe(
        "tables", "where embedding tables go: a plan (.json, .yaml, or its JSON)", file=True,
        default="greedy by lookups"
    )] | None = None
    dense: Annotated[PlanText, _describe(
        "tables", "dense part of a set of tables, in YAML", file=True, default="none: tables alone"
    )] | None = None

    host: Annotated[Host, _describe(
        "host", "a CPU by name (AMD EPYC 7742), or a host profile", default="the platform's"
    )] | None = None
    skew_ms: Annotated[float, _describe(
        "host", "ranks begin up to so late, at random", least=0, most=1e6, unit="ms", default="0", law="slower"
    )] | None = None
    jitter: Annotated[float, _describe(
        "host", "ranks take longer by this share, at random", least=0, most=10, default="0", law="slower"
    )] | None = None
    seed: Annotated[int, _describe(
        "host", "of skew and jitter", least=0, most=1 << 62, default="0", needs=("skew_ms", "jitter")
    )] | None = None

    loader_ms: Annotated[float, _describe(
        "loader", "what a worker takes for a batch", least=0, most=1e6, unit="ms", default="0", law="slower"
    )] | None = None
    workers: Annotated[int, _describe(
        "loader", "processes of the data loader; 0: the training loop makes batches", least=0, most=4096, default="0",
        needs=("loader_ms",), law="faster"
    )] | None = None
    pageable: Annotated[bool, _describe("loader", "inputs are copied from pageable memory", law="slower")] = False

    costs: Annotated[Costs, _describe(
        "costs", "what ops of your own cost (.toml)", file=True, default="none"
    )] | None = None
    roofline_only: Annotated[bool, _describe(
        "costs", "rooflines instead of the fitted kernel models", law="faster"
    )] = False

    # fmt: on
    def __post_init__(self) -> None:
        for name, info in list_scenario_fields().items():
            value = getattr(self, name)
            if info.kind != "text" and value is not None and value is not False:
                info.check(value)

    def replace(self, **changes: Any) -> Scenario:
        """The scenario with other values."""
        return msgspec.structs.replace(self, **changes)

    def given(self) -> dict[str, Any]:
        """The fields that were given, by name; the workload and the platform are always among them."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def samples_per_pass(self) -> int | None:
        """Samples of a GPU's forward pass: `micro_batch`, or else `batch_size`; None where neither was given."""
        return self.batch_size if self.micro_batch is None else self.micro_batch

    @property
    def launches(self) -> str:
        """Who launches kernels: `kernels`, or what `compiled` and `cuda_graph` say of it."""
        for flag, kind in (("compiled", "compiled"), ("cuda_graph", "graph")):
            if getattr(self, flag) and self.kernels not in (None, kind):
                raise TraincastError(f"`{flag}` and `kernels={self.kernels}` contradict each other; give one of them")
        if self.kernels is not None:
            return self.kernels
        return "compiled" if self.compiled else "graph" if self.cuda_graph else "eager"

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler launches the kernels."""
        return self.compiled or self.kernels == "compiled"

    @property
    def is_graphed(self) -> bool:
        """Whether the step is replayed as CUDA graphs."""
        return self.cuda_graph or self.kernels == "graph"

    @property
    def trains_eagerly(self) -> bool:
        """Whether the step is one of training without a compiler: what can be sharded over GPUs."""
        return self.mode != "inference" and not self.is_compiled


@cache
def list_scenario_fields() -> dict[str, FieldInfo]:
    """Every field by name, in the order of the declaration."""
    hints = typing.get_type_hints(Scenario, include_extras=True)
    return {name: make_field_info(name, hints[name]) for name in Scenario.__struct_fields__}
