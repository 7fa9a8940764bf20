"""Workloads become steps of one GPU, at the size and in the variant that a scenario asks for, and are spread over GPUs.

Writers of programs are imported when a step needs them: most predictions read one file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from traincast.ir.edit import without_phase
from traincast.ir.file import load_workload
from traincast.ir.ops import Phase
from traincast.ir.workload import Workload
from traincast.models.catalog import load_model
from traincast.simulator.scenario.kinds import source_kind
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.hardware.platform import Platform


def default_dtype(kind: str) -> str:
    """The arithmetic of a step that names none: bf16 of Transformers by description, else fp32."""
    return "bf16" if kind in ("transformer", "parallel") else "fp32"


def load(scenario: Scenario, kind: str | None = None) -> Workload:
    """The step of one GPU (or of those it was captured on) that a scenario asks for; `kind` is that of its workload
    where it is known."""
    kind = kind or source_kind(scenario.workload)
    if scenario.dtype is None:
        scenario = scenario.replace(dtype=default_dtype(kind))
    if kind == "program":
        from traincast.models.published import published_program
        from traincast.simulator.scenario.published import published_step

        return published_step(published_program(str(scenario.workload)), 1, scenario)[0]
    if kind == "transformer":
        from traincast.simulator.scenario.transformers import described_step

        return described_step(scenario.workload, scenario)
    if kind == "tables":
        raise TraincastError(f"{scenario.workload} is a set of embedding tables, not a step; name a model")
    source = scenario.workload
    if isinstance(source, Workload):
        return _at_size(_held(source, f"workload '{source.name}'", scenario), scenario)
    return _at_size(_named(str(source), kind, scenario), scenario)


def spread(
    workload: Workload, gpus: int | None, platform: Platform, *, always_sharded: bool = False
) -> tuple[Workload, str]:
    """A workload that was loaded on `gpus` GPUs (None: its own), and what was assumed: one that trains FBGEMM tables
    shards them, every other one is data parallel."""
    if gpus is None:
        return workload, ""
    if gpus > 1 or always_sharded:
        from traincast.models.sharded_dlrm.recommender import is_shardable
        from traincast.simulator.scenario.programs import sharded_on

        if is_shardable(workload):
            return sharded_on(workload, gpus, platform, None)
    from traincast.models.data_parallel import replicate_on_gpus

    return replicate_on_gpus(workload, gpus), ""


def as_compiled(workload: Workload) -> Workload:
    """A workload of eager ops as `torch.compile` of its model would run it."""
    from traincast.costs.kernels.registry import lowering_context
    from traincast.transforms.fusion import compile_step

    return compile_step(workload, lowering_context(workload))


def _at_size(workload: Workload, scenario: Scenario) -> Workload:
    resized = workload.resized(batch_size=scenario.samples_per_pass, seq_len=scenario.seq_len)
    if scenario.is_compiled:
        return as_compiled(resized)
    from traincast.costs.kernels.registry import lowering_context
    from traincast.transforms.fusion import compile_regions

    return compile_regions(resized, lowering_context(resized))


def _held(workload: Workload, name: str, scenario: Scenario) -> Workload:
    """A workload that was captured before, called `name` in messages, with what can still be chosen of it."""
    check_held(name, workload.mode, scenario)
    return without_phase(workload, Phase.OPTIMIZER) if scenario.optimizer == "none" else workload


def check_held(name: str, mode: str, scenario: Scenario) -> None:
    """Rejects what cannot be chosen any more of a workload that was captured: its mode, optimizer, ops and types."""
    if scenario.mode not in (None, mode):
        raise TraincastError(
            f"{name} holds a step of {mode}, not {scenario.mode}; capture it again for `mode={scenario.mode}`"
        )
    if scenario.optimizer not in (None, "none"):
        raise TraincastError(f"{name} holds its own optimizer; only `optimizer='none'` can change it")
    if scenario.dtype in ("fp16", "bf16", "fp8"):
        raise TraincastError(
            f"{name} keeps the types it was captured with; capture it under autocast for {scenario.dtype}, or ask "
            f"`whatif` with `dtype={scenario.dtype}`"
        )
    for option in ("attention", "embedding"):
        choice = getattr(scenario, option)
        if choice is not None:
            raise TraincastError(
                f"{name} keeps the ops it was captured with; leave out `{option}`, or capture the model with {choice}"
            )


def _named(name: str, kind: str, scenario: Scenario) -> Workload:
    if kind == "workload":
        return _held(load_workload(Path(name)), Path(name).name, scenario)
    mode = scenario.mode or "training"
    precision = str(scenario.dtype)
    if precision == "fp8":
        raise TraincastError(
            f"`dtype=fp8` needs modules that scale their operands, which {name} does not have; it is for described "
            "Transformers: give bf16"
        )
    if name.endswith((".yaml", ".yml")):
        from traincast.simulator.scenario.dlrm_file import load_dlrm_yaml

        return load_dlrm_yaml(
            Path(name), mode=mode, optimizer=scenario.optimizer, precision=precision, embedding=scenario.embedding
        )
    return load_model(
        name, mode=mode, optimizer=scenario.optimizer, precision=precision, attention=scenario.attention,
        embedding=scenario.embedding,
    )  # fmt: skip
