"""Peak memory of the fullest rank, by what fills it."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.stage_units import Share
from traincast.simulator.parallelism.step import Stage

_CONTEXT_BYTES = 1.0e9  # CUDA context and libraries' workspaces of one process, H100 and A100 with PyTorch 2
_GROUP_BYTES = 0.25e9  # NCCL's buffers of one communicator: channels x 4 MB x peers of its rings and trees
_FRAGMENTED = 0.03  # of what is allocated: blocks that the allocator holds and cannot use


def compute_stage_memory(layout: Layout, stage: Stage, number: int) -> dict[str, float]:
    """Bytes at the peak of one rank of stage `number`, as the allocator counts them, by kind."""
    whole = stage.dense + stage.sparse
    held = _count_state_bytes(layout, stage)
    held["activations"] = sum(unit.saved for unit in stage.units) * _count_micro_batches_in_flight(layout, number)
    held["working"] = max(unit.working for unit in stage.units)
    if layout.sharding == "zero3":
        # the unit at work and the next one, whole, and one unit of gradients
        largest = sorted((unit.dense + unit.sparse for unit in stage.units), reverse=True)[:2]
        item = layout.gather_bytes
        gathered = sum(largest) if layout.reshard else whole
        held["communication"] = item * gathered + layout.reduce_bytes * largest[0]
    return {kind: size for kind, size in held.items() if size}


def find_peak_memory(layout: Layout, stages: Sequence[Stage]) -> tuple[dict[str, float], float]:
    """The fullest rank: bytes of the allocator by kind, and all that the device must hold (context, exchanges'
    buffers and what is lost between blocks included)."""
    by_stage = [compute_stage_memory(layout, stage, number) for number, stage in enumerate(stages)]
    fullest = max(by_stage, key=lambda kinds: sum(kinds.values()))
    groups = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp))
    allocated = sum(fullest.values())
    return fullest, allocated * (1 + _FRAGMENTED) + _CONTEXT_BYTES + groups * _GROUP_BYTES


def _count_state_bytes(layout: Layout, stage: Stage) -> dict[str, float]:
    """Parameters, gradients and optimizer of a rank."""
    inner = max(1, layout.gpus // layout.pp // (layout.ep * layout.etp))
    shares = {
        "parameters": layout.sharding == "zero3",
        "gradients": layout.sharding in ("zero2", "zero3") and not layout.gathers_once,
        "optimizer": layout.sharding != "none",
    }
    elements = {
        kind: part.dense / (layout.sharing if shared else 1) + part.sparse / (inner if shared else 1)
        for kind, shared in shares.items()
        for part in [Share(stage.dense, stage.sparse) if kind == "parameters" else stage.trained]
    }
    if layout.adapter_rank:
        frozen = {"fp8": 1, "fp4": 0.5625}.get(layout.precision, 2) * elements["parameters"]
        return {"parameters": frozen + 2 * stage.trained.dense, "gradients": 4 * elements["gradients"],
                "optimizer": 12 * elements["optimizer"]}  # fmt: skip
    if layout.wide or layout.sharding == "zero3":
        # FSDP keeps the fp32 weights themselves and gathers them in 16 bits
        sizes = {"parameters": 4, "gradients": 4, "optimizer": 8}
    else:
        sizes = {"parameters": 2, "gradients": 4 if layout.kernels in ("fused", "graph") else 2, "optimizer": 12}
    if layout.optimizer == "none":
        sizes["optimizer"] = 0
    return {kind: sizes[kind] * elements[kind] for kind in sizes}


def _count_micro_batches_in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once."""
    most = float(layout.accumulation)
    if layout.pp == 1:
        return 1.0
    if layout.vp > 1:
        # Narayanan et al. 2021: this many chunks have gone forward before the stage's first backward
        chunks = 2 * (layout.pp - stage - 1) + (layout.vp - 1) * layout.pp + 1
        return min(most, chunks / layout.vp)
    return min(most, float(layout.pp - stage))
