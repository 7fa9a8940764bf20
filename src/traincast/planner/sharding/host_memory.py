"""Why a plan has tables in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from traincast.models.placement.kinds import ComputeKernel
from traincast.models.placement.memory import compute_shard_bytes
from traincast.models.placement.plan import Plan
from traincast.planner.sharding.scored_plan import ScoredPlan
from traincast.planner.sharding.task import Task
from traincast.utils.display.text import format_milliseconds

_SHOWN = 3  # names of tables


def explain_host_memory(task: Task, best: ScoredPlan, score: Callable[[Plan], ScoredPlan]) -> tuple[str, ...]:
    """One line for tables that the device of their rank has no room for, and one for those that would fit: what the
    step would lose, or lack, with them on the device. `score` walks a plan. Empty where no table is in host memory."""
    plan = best.plan
    there = [number for number, placement in enumerate(plan.placements) if placement.kernel.in_host_memory]
    lacks = {number: _count_missing_bytes(task, best, number) for number in there}
    large, small = ([n for n in there if (lacks[n] > 0.0) is lacking] for lacking in (True, False))
    notes = []
    if large:
        least, most = (pick(lacks[n] for n in large) / 1e9 for pick in (min, max))
        notes.append(
            "in host memory because the devices of their ranks have no room for them: "
            f"{_join_names(task, large)} (each "
            f"alone on the device, {_format_range(least, most)} GB would be missing)"
        )
    if small:
        why = _explain_together(task, best, small, score)
        notes.append(f"in host memory although each would fit: {_join_names(task, small)}; {why}")
    return tuple(notes)


def _explain_together(task: Task, best: ScoredPlan, small: Sequence[int], score: Callable[[Plan], ScoredPlan]) -> str:
    """What keeps tables in host memory of which each would fit on its device."""
    moved = score(_move_to_devices(best.plan, small))
    if not moved.fits:
        return f"all on their devices, {moved.missing / 1e9:.1f} GB would be missing"
    longer = moved.seconds - best.seconds
    if longer > 0.0:
        return (
            f"on their devices the step is {format_milliseconds(longer)} ms longer: they need kernels of their own "
            "there"
        )
    return "on their devices the step is as long"


def _move_to_devices(plan: Plan, numbers: Sequence[int]) -> Plan:
    """The plan with some tables on the devices of their ranks."""
    placements = [
        replace(placement, kernel=ComputeKernel.FUSED, cache_fraction=0.0) if number in numbers else placement
        for number, placement in enumerate(plan.placements)
    ]
    return replace(plan, placements=tuple(placements))


def _count_missing_bytes(task: Task, best: ScoredPlan, number: int) -> float:
    """Bytes that a device lacks for one more table: what its rank holds, and what more the table takes there."""
    table, sizes = task.tables[number], {"batch_size": task.batch_size, "world_size": task.gpus}
    plans, lacking = (_move_to_devices(best.plan, [number]), best.plan), 0.0
    for shard in (one for one in best.plan.make_shards(task.tables) if one.table == number):
        after, before = (compute_shard_bytes(table, plan.placements[number], shard, **sizes)[0] for plan in plans)
        held = best.rank_memory[shard.rank].peak_bytes + after - before
        lacking = max(lacking, held - task.limits.device * (1.0 - task.limits.headroom))
    return lacking


def _join_names(task: Task, numbers: Sequence[int]) -> str:
    names = ", ".join(task.tables[number].name for number in numbers[:_SHOWN])
    return names if len(numbers) <= _SHOWN else f"{names} and {len(numbers) - _SHOWN} more"


def _format_range(least: float, most: float) -> str:
    return f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}"
