"""How a step runs: batch size, arithmetic and optimizer, lookups, fusion, gradients, launches, and what feeds and
divides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

import numpy as np

from traincast.hardware.platform import Platform, add_default_links
from traincast.ir.program import Program
from traincast.ir.workload import MAX_BATCH, Workload
from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.predict import describe_missing_units, make_loader
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import Checkpoint, Dtype, Embedding, Optimizer, ProgramName
from traincast.simulator.scenario.workloads import TORCHREC
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.models.dlrm.config import DlrmConfig
    from traincast.models.placement.plan import Plan
    from traincast.models.sharded_dlrm.dense import Dense


@register_edit("batch-size", "samples per GPU (of a micro-batch where a Transformer is laid out over GPUs)", takes="N",
      risk="accuracy: another batch",
      trials=(Trial("x2"), Trial("x4"),
              *(Trial(part, "", "all") for part in ("x0.5", "x0.25", "x0.125", "x0.0625"))))  # fmt: skip
def change_batch_size(resolved: Resolved, value: Value) -> Resolved:
    """Another batch size per GPU; `x2` is twice what it is."""
    if value.text.startswith("x"):
        number = round(get_batch_size(resolved) * value.factor())
        return change_batch_size(resolved, Value(text=str(max(1, number)), edit=value.edit))
    number = value.whole(most=MAX_BATCH)
    scenario, layout = resolved.scenario, resolved.layout
    if layout is None:
        return resolved.changed(batch_size=number)
    sizes = {"batch_size" if scenario.micro_batch is None else "micro_batch": number}
    if scenario.global_batch is not None:
        share = number * layout.dp
        sizes["global_batch"] = max(share, scenario.global_batch // share * share)
    return resolved.changed(**sizes)


def get_batch_size(resolved: Resolved) -> int:
    """Samples per GPU of a step as it is."""
    from traincast.simulator.scenario.workloads import load_single_gpu_step  # only factors need it

    scenario = resolved.scenario
    if resolved.source == "transformer":
        return scenario.micro_batch or scenario.batch_size or 1
    if scenario.batch_size is not None:
        return scenario.batch_size
    if resolved.dlrm is not None or resolved.source == "dlrm":
        return resolved.of_dlrm().batch_size
    if resolved.source == "program":
        raise TraincastError(f"{resolved.name} has a batch for all its GPUs; give a number instead of a factor")
    return load_single_gpu_step(scenario, resolved.source).batch_size


_HALF = {"amp": "float16", "fp16": "float16", "bf16": "bfloat16"}
_WEIGHTS = {"fp16-weights": "float16", "bf16-weights": "bfloat16"}
DTYPES, OPTIMIZERS = get_args(Dtype), get_args(Optimizer)
_SCALED = ("fp8", "fp4")
_ALL = (*(name for name in DTYPES if name not in _SCALED), "amp", *_WEIGHTS, *_SCALED)
_RISKS = {
    "fp32": "", "tf32": "accuracy: GEMMs of 10 bits", "bf16": "accuracy: numbers of 7 bits",
    **dict.fromkeys(("fp16", "amp"), "accuracy: numbers of 10 bits, the loss must be scaled"),
    **dict.fromkeys(_WEIGHTS, "accuracy: weights and optimizer in 16 bits"),
    "fp8": "accuracy: GEMMs with mantissas of 2 or 3 bits, operands must be scaled",
    "fp4": "accuracy: GEMMs of 1 bit, blocks of operands must be scaled",
}  # fmt: skip
"""Of each type, by the bits of its fraction."""


@register_edit(
    "dtype",
    "arithmetic: TF32, autocast to 16 bits (amp: fp16, PyTorch's default), weights in 16 bits, fp8 and "
    "fp4 of described Transformers",
    takes="|".join(_ALL),
    risk="accuracy: fewer bits; fp16 needs loss scaling",
    risks=_RISKS,
    trials=(Trial("tf32", "steps"), Trial("bf16", "all", "steps"), Trial("fp8", "layouts")),
)
def change_dtype(resolved: Resolved, value: Value) -> Resolved:
    """Another arithmetic."""
    choice = value.choice(_ALL)
    if resolved.kind == "parallel":
        if choice == "amp":
            return resolved.changed(dtype="fp16", autocast=True)
        return resolved.changed(dtype=choice.removesuffix("-weights"), autocast=False)
    if choice in _SCALED:
        raise TraincastError(
            f"{choice} needs modules that scale their operands, which a step of ops does not have; it is predicted for "
            "described Transformers: give bf16 here"
        )
    from traincast.transforms.retyping.edit import with_autocast, with_weights  # only this edit needs them

    if choice in _WEIGHTS:
        if resolved.scenario.mode == "inference" and resolved.source != "workload":
            return resolved.changed(dtype=choice.removesuffix("-weights"))
        return _cast_ops(resolved, choice, with_weights, _WEIGHTS[choice])
    if choice in _HALF and _is_described_dlrm(resolved):
        infers = resolved.scenario.mode == "inference"
        return _cast_ops(resolved, choice, with_weights if infers else with_autocast, _HALF[choice])
    if choice in _HALF and resolved.source == "workload":
        return _cast_ops(resolved, choice, with_autocast, _HALF[choice])
    return resolved.changed(dtype="fp16" if choice == "amp" else choice)


def _is_described_dlrm(resolved: Resolved) -> bool:
    """Whether the step is that of a DLRM on one GPU that is written in float32 from its file."""
    alone = resolved.source == "dlrm" and resolved.gpus == 1 and resolved.scenario.program is None
    return alone and resolved.dlrm is None and str(resolved.scenario.workload).endswith((".yaml", ".yml"))


def _cast_ops(
    resolved: Resolved, choice: str, retyped: Callable[[Workload, str], tuple[Workload, str]], low: str
) -> Resolved:
    """The step with casts among its ops."""
    missing = describe_missing_units({"float16": "fp16", "bfloat16": "bf16"}[low], resolved.platform)

    def edited(step: Workload) -> tuple[Workload, str]:
        changed, notes = retyped(step, low)
        return changed, f"{notes}; {missing}" if missing else notes

    return resolved.edited(f"dtype={choice}", edited)


@register_edit("optimizer", "another optimizer, or none", takes="|".join(OPTIMIZERS), risk="accuracy: another training")
def optimizer(resolved: Resolved, value: Value) -> Resolved:
    """Another optimizer."""
    choice = value.choice(OPTIMIZERS)
    if resolved.source == "workload" and choice != "none":
        from traincast.transforms.updates import change_optimizer  # only this edit needs it

        return resolved.edited(f"optimizer={choice}", lambda step: change_optimizer(step, choice))
    return resolved.changed(optimizer=choice)


EMBEDDINGS = get_args(Embedding)


@register_edit(
    "embedding", "the operator that looks tables up", takes="|".join(EMBEDDINGS), excludes=("fuse-embedding-bags",)
)
def change_embedding(resolved: Resolved, value: Value) -> Resolved:
    """Another lookup."""
    choice = value.choice(EMBEDDINGS)
    if resolved.dlrm is not None:
        return replace(resolved, dlrm=replace(resolved.dlrm, embedding=choice)).changed(embedding=choice)
    return resolved.changed(embedding=choice)


@register_edit("fuse-embedding-bags", "one embedding bag per table becomes one table-batched op",
      trials=(Trial("", "steps"),), risk="the optimizer of the tables runs inside backward")  # fmt: skip
def fuse_embedding_bags(resolved: Resolved, value: Value) -> Resolved:
    """One table-batched lookup instead of one per table."""
    if resolved.source == "dlrm" and resolved.gpus == 1:
        now = resolved.scenario.embedding or resolved.of_dlrm().embedding
        if now != "bag":
            raise TraincastError(f"{resolved.name} looks all tables up in one op already (embedding {now})")
        return resolved.changed(embedding="batched")
    if resolved.gpus > 1 and resolved.source == "dlrm":
        raise TraincastError(f"the tables of {resolved.name} on several GPUs are FBGEMM's table-batched ones already")
    from traincast.transforms.batching import batch_bags  # a what-if reads the ops of its own edits only

    return resolved.edited("fuse-embedding-bags", batch_bags)


@register_edit(
    "fuse-elementwise",
    "chains of element-wise ops as one kernel each",
    trials=(Trial(""),),
    excludes=("compile",),
    risk="somebody must write the kernels",
)
def fuse_elementwise(resolved: Resolved, value: Value) -> Resolved:
    """Fused chains; every other op stays as it is."""
    if resolved.scenario.is_compiled:
        raise TraincastError("a compiled step has its chains fused already; leave out `compiled`")
    from traincast.transforms.fusion import fuse_ops  # only this edit needs it

    return resolved.edited("fuse-elementwise", fuse_ops)


@register_edit("compile", "the step as torch.compile would run it", risk="compilation takes minutes",
      trials=(Trial(""),), excludes=("kernels",))  # fmt: skip
def compile_step(resolved: Resolved, value: Value) -> Resolved:
    """A compiled step."""
    if resolved.scenario.is_compiled:
        return resolved
    return replace(resolved.changed(kernels="compiled"), software=(*resolved.software, "compile"))


@register_edit("bucket-mb", "size of DDP's gradient buckets, MiB", takes="N", trials=(Trial("100"),))
def change_bucket_size(resolved: Resolved, value: Value) -> Resolved:
    """Other buckets of gradients."""
    return replace(resolved, bucket_mb=value.factor(least=1e-3, most=1e6))


@register_edit(
    "checkpoint",
    "activations computed again in backward: of layers or a pattern of module paths; of described "
    "Transformers " + ", ".join(get_args(Checkpoint)),
    takes="layers|PATTERN",
    trials=(Trial("layers", "steps", "steps"), *(Trial(kind, "layouts", "layouts") for kind in ("selective", "full"))),
    excludes=("compile", "fuse-elementwise"),
    risk="the forward pass of the modules runs twice",
)
def checkpoint_modules(resolved: Resolved, value: Value) -> Resolved:
    """Less memory for more work."""
    if resolved.source == "transformer":
        return resolved.changed(checkpoint=value.choice(get_args(Checkpoint)))
    if resolved.scenario.is_compiled:
        raise TraincastError("what a compiled step computes again is the compiler's choice; leave out `compiled`")
    from traincast.transforms.checkpointing import checkpoint_layers  # only this edit needs it

    return resolved.edited(f"checkpoint={value.text}", lambda step: checkpoint_layers(step, value.text))


@register_edit(
    "accumulate", "N batches before each update", takes="N", trials=(Trial("4"),), risk="accuracy: a larger batch"
)
def accumulate(resolved: Resolved, value: Value) -> Resolved:
    """Gradients of several batches added up."""
    passes = value.whole(most=1024)
    if resolved.source == "transformer":
        layout = resolved.layout
        if layout is None:
            raise TraincastError(f"{resolved.name} only infers, which updates nothing; leave out `mode`")
        return resolved.changed(global_batch=layout.dp * layout.micro_batch * passes)
    if passes == 1:
        return resolved
    if resolved.scenario.fsdp or resolved.scenario.zero:
        raise TraincastError(
            f"{resolved.name} shares its gradients among GPUs, in which a pass may take part; ask for its passes with "
            "`global_batch`"
        )
    from traincast.transforms.updates import accumulate_gradients  # only this edit needs it

    return resolved.edited(f"accumulate={passes}", lambda step: accumulate_gradients(step, passes), across=True)


@register_edit("overlap", "communication that overlaps kernels: on, none, or of described Transformers a list",
      takes="on|none|KIND,KIND...")  # fmt: skip
def change_overlap(resolved: Resolved, value: Value) -> Resolved:
    """Collectives that wait for kernels and hold them up, as on one stream."""
    if resolved.source == "transformer":
        return resolved.changed(overlap=None if value.text == "on" else value.text, no_overlap=False)
    choice = value.choice(("on", "none"))
    return resolved if choice == "on" else resolved.edited("overlap=none", _put_on_one_stream, across=True)


def _put_on_one_stream(step: Workload) -> tuple[Workload, str]:
    if len(step.ranks) == 1:
        raise TraincastError("one GPU communicates nothing; give `gpus` of 2 or more")
    return replace(
        step, programs=tuple(map(_serialise_collectives, step.programs))
    ), "collectives run on the stream of the kernels"


def _serialise_collectives(program: Program) -> Program:
    exchanges = np.array([signature.name.startswith("c10d::") for signature in program.symbolic], dtype=np.bool_)
    c = program.columns
    stream = np.where(exchanges[c.op_signature], 0, c.op_stream).astype(np.int32)
    return replace(program, columns=replace(c, op_stream=stream))


@register_edit("cuda-graph", "the step replayed as CUDA graphs", risk="shapes and addresses must stay",
      trials=(Trial(""),), excludes=("kernels",))  # fmt: skip
def replay_cuda_graph(resolved: Resolved, value: Value) -> Resolved:
    """A step that is replayed."""
    if resolved.scenario.is_graphed:
        return resolved
    return replace(resolved, software=(*resolved.software, "cuda-graph")).changed(cuda_graph=True)


@register_edit(
    "stream", "all ops of a name on another stream", takes="N", target="OP", risk="the kernels share the GPU"
)
def stream(resolved: Resolved, value: Value) -> Resolved:
    """Ops alongside others; streams wait for each other where data crosses."""
    from traincast.transforms.updates import move_to_stream  # only this edit needs it

    number = value.whole(least=0, most=63)
    return resolved.edited(
        f"stream:{value.target}={number}", lambda step: move_to_stream(step, value.target, number), across=True
    )


SEARCH = "search"
_SEARCH_SECONDS = 20.0


@register_edit("input-pipeline", "batches are there when the step wants them, in pinned memory",
      trials=(Trial("", "steps"),), risk="more loader workers")  # fmt: skip
def change_input_pipeline(resolved: Resolved, value: Value) -> Resolved:
    """A loader that keeps up."""
    if make_loader(resolved.scenario) is None:
        raise TraincastError("the step has no data loader that could hold it up; say how batches come (`loader_ms`)")
    return resolved.changed(loader_ms=None, workers=None, pageable=False)


@register_edit("program", "the program that trains a DLRM on several GPUs", takes="|".join(get_args(ProgramName)),
      risk="another code base", trials=(Trial("torchrec-pipelined", "steps"),))  # fmt: skip
def change_program(resolved: Resolved, value: Value) -> Resolved:
    """Another program."""
    choice = value.choice(get_args(ProgramName))
    asked = resolved.changed(program=choice)
    same = choice == (resolved.scenario.program or (TORCHREC if resolved.gpus > 1 else None))
    return asked if same else replace(asked, software=(*resolved.software, f"program={choice}"))


@register_edit(
    "plan",
    "another sharding plan: a file, or the best that is found",
    takes=f"FILE|{SEARCH}",
    trials=(Trial(SEARCH, "steps"),),
    risk="tables must be moved",
)
def change_plan(resolved: Resolved, value: Value) -> Resolved:
    """Tables elsewhere."""
    from traincast.models.sharded_dlrm.dense import Dense  # only this edit needs them
    from traincast.simulator.scenario.workloads import AUTOCAST

    config = resolved.of_dlrm()
    if resolved.gpus == 1:
        raise TraincastError("on one GPU there is no plan to choose; give `gpus` of 2 or more")
    if resolved.scenario.mode == "inference":
        raise TraincastError("GPUs that only infer share no tables here, each has them all; leave out `mode`")
    if value.text == SEARCH:
        dense = replace(Dense.from_dlrm(config), half=AUTOCAST[resolved.scenario.dtype])
        return replace(
            resolved,
            plan=_search_plan(config, dense, resolved.gpus, get_batch_size(resolved), _Held(resolved.platform)),
        )
    return resolved.changed(plan=value.text)


@dataclass(frozen=True, slots=True)
class _Held:
    """A platform that is the same as another one of the same figures."""

    platform: Platform

    def __hash__(self) -> int:
        return hash(self.platform.key)


@lru_cache(maxsize=64)
def _search_plan(config: DlrmConfig, dense: Dense, gpus: int, batch_size: int, held: _Held) -> Plan:
    """The best plan that is found in time. It is searched once: how far a search gets in its time is not always the
    same, and one question is to have one result."""
    from traincast.models.sharded_dlrm.step import make_dlrm_tables  # only this edit needs the search
    from traincast.planner.sharding.result import make_task
    from traincast.planner.sharding.search import search

    platform = add_default_links(held.platform)
    task = make_task(make_dlrm_tables(config), platform, gpus=gpus, batch_size=batch_size, dense=dense)
    return search(task, time_limit=_SEARCH_SECONDS).best.plan
