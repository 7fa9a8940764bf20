"""The step of plans that use the same groups, as a compiled walk whose open durations depend on the plan.

One rank's program is built as the full walk builds it, for a plan of this structure. Lookups, updates and collectives
are left open. So are the small kernels around them, which are tabulated once at several loads of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traincast.costs.host.profile import ALONE, HostProfile
from traincast.models.placement.memory import INDEX_BYTES, LENGTH_BYTES
from traincast.models.sharded_dlrm.layout import Batch, Layout, Section
from traincast.models.sharded_dlrm.marks import ScopeRole
from traincast.planner.sharding.layouts import (
    Heaviest,
    list_held_batches,
    make_least_layout,
    make_typical_layout,
    scale_layout,
)
from traincast.planner.sharding.lookups import TableGroup
from traincast.planner.sharding.max_plus import SimulationCode, compile_simulation
from traincast.planner.sharding.rank import EMPTY, RankProgram
from traincast.planner.sharding.slots import SMALL, Part, Slot
from traincast.planner.sharding.task import Task
from traincast.simulator.prediction.step import list_host_seconds
from traincast.utils.arrays import FloatArray

LOADS = (0.0, 1 / 1024, 1 / 32, 1 / 8, 1 / 2, 2.0)
"""Loads of a rank, over the heaviest to be expected, at which the small kernels are tabulated. At 0 they take what they
take at least: the heaviest may be a copy of a huge table, thousands of times what a good plan copies."""


@dataclass(frozen=True, eq=False, slots=True)
class Around:
    """The small kernels around an open one: their `seconds` at each `load` of a rank, as `load_of` counts it; and its
    `lookups` there, in this many `rows`."""

    load: FloatArray
    seconds: FloatArray
    lookups: FloatArray
    rows: FloatArray

    def interpolate_beyond(self, load: FloatArray) -> FloatArray:
        """Seconds at other loads, beyond the least."""
        steep = (self.seconds[-1] - self.seconds[-2]) / max(self.load[-1] - self.load[-2], 1e-30)
        outside = np.maximum(load - self.load[-1], 0.0) * steep
        return np.asarray(np.interp(load, self.load, self.seconds - self.seconds[0]) + outside)


Surroundings = dict[Slot, Around]


def compute_load(
    role: ScopeRole | Part, group: TableGroup, samples: int, *, tables: Any, lookups: Any, elements: Any
) -> Any:
    """What the small kernels around a lookup or update grow with: bytes of lookups and their lengths; the sort of an
    update with its lookups; whatever is done to the gradients of data-parallel tables with their elements. Numbers or
    arrays.
    """
    if role in (Part.SORT, ScopeRole.STEP):
        return elements if group.copied else lookups
    return INDEX_BYTES * lookups + LENGTH_BYTES * samples * tables


@dataclass(frozen=True, eq=False, slots=True)
class Structure:
    """A compiled walk: `slots` are its open durations, `bytes` are messages of the compiled plan, `per_sender` the
    seconds of host work for one sender.

    The open duration of a kernel includes what the small kernels around it take beyond the smallest of `LOADS`.
    """

    code: SimulationCode
    slots: tuple[Slot, ...]
    bytes: dict[Slot, int]
    per_sender: dict[Slot, float]


def time_surroundings(
    task: Task, layout: Layout, groups: Sequence[TableGroup], heaviest: Sequence[Heaviest]
) -> Surroundings:
    """The small kernels of the groups of a layout, at `LOADS` times what `heaviest` says."""
    alone, one = replace(task, dense=None), make_typical_layout(layout, _count_columns(task))
    layouts = [scale_layout(one, load, groups, heaviest) for load in LOADS]
    ranks = [RankProgram.of(alone, layout, groups) for layout in layouts]
    batches = [list_held_batches(layout, groups) for layout in layouts]
    return {
        slot: Around(
            np.array([_compute_slot_load(slot, *loaded, groups) for loaded in zip(layouts, batches, strict=True)]),
            np.array([rank.seconds[rank.around[slot]].sum() for rank in ranks]),
            np.array(
                [
                    float(sum(batch.lookups for batch in _select_batches(slot, some, groups).values()))
                    for some in batches
                ]
            ),
            np.array(
                [float(sum(batch.rows for batch in _select_batches(slot, some, groups).values())) for some in batches]
            ),
        )
        for slot in ranks[0].around
    }


def _count_columns(task: Task) -> int:
    return sum(table.dim for table in task.tables)


def _select_batches(slot: Slot, batches: dict[int, Batch], groups: Sequence[TableGroup]) -> dict[int, Batch]:
    """The batches that an open kernel belongs to: those of its group, or of its kind of sharding."""
    if slot.group >= 0:
        return {slot.group: batches[slot.group]}
    return {group: batch for group, batch in batches.items() if groups[group].kind is slot.kind}


def _compute_slot_load(slot: Slot, layout: Layout, batches: dict[int, Batch], groups: Sequence[TableGroup]) -> float:
    """The load of the compiled rank for one open kernel."""
    size, world = layout.batch_size, layout.world_size
    if slot.role is ScopeRole.ORDER:
        return sum(
            INDEX_BYTES * _count_local_lookups(section) + LENGTH_BYTES * size * section.features
            for section in layout.sections
        )
    served = _select_batches(slot, batches, groups)
    if slot.role is ScopeRole.BUCKET:
        section = next(section for section in layout.sections if section.kind is slot.kind)
        return INDEX_BYTES * _count_local_lookups(section) + LENGTH_BYTES * size * float(sum(section.tables))
    if slot.role in (ScopeRole.JOIN, ScopeRole.BESIDE) and slot.kind is not None:
        samples = size if slot.role is ScopeRole.JOIN else slot.kind.count_samples(size, world)
        return samples * float(sum(batch.columns for batch in served.values()))
    total = 0.0
    for group, batch in served.items():
        samples = groups[group].kind.count_samples(size, world)
        total += compute_load(
            slot.role, groups[group], samples, tables=batch.tables, lookups=batch.lookups, elements=batch.elements
        )
    return total


def _count_local_lookups(section: Section) -> float:
    """Lookups of one rank's samples in all tables of a kind."""
    if section.kind.copied:
        return float(section.lookups[0])
    return sum(section.lookups) / len(section.ranks)


def compile_rank(task: Task, layout: Layout, groups: Sequence[TableGroup]) -> RankProgram:
    """The program that stands for plans like the one laid out; `groups` are all that plans may use, in order."""
    return RankProgram.of(task, make_least_layout(make_typical_layout(layout, _count_columns(task))), groups)


def build_structure(
    task: Task, rank: RankProgram, host: HostProfile, around: Surroundings, *, partial: bool
) -> Structure:
    """Compiles the simulation of plans whose ranks run this program; `partial` says that some lack tables of some
    group."""
    busy = list_host_seconds(rank.schedule, rank.program, host)
    work, senders = rank.list_host_work()
    empty = float(host.scope_seconds([EMPTY])[0, ALONE] + host.gap_seconds([EMPTY], main=True)[0])
    skips = rank.list_skips(empty) if partial else []
    seconds = rank.seconds.copy()
    seconds[[at for at, slot in rank.slots.items() if slot.role not in SMALL]] = 0.0
    for slot, launches in rank.around.items():
        seconds[launches] *= min(1.0, around[slot].seconds[0] / max(float(seconds[launches].sum()), 1e-30))
    code = compile_simulation(
        rank.schedule, busy, seconds, rank.slots, gap=task.device.kernel_gap, late=work, skips=skips
    )
    slots = dict.fromkeys([*rank.slots.values(), *work.values(), *(skip.slot for skip in skips)])
    by_scope = np.bincount(rank.schedule.scope, weights=busy)
    per_sender = {slot: float(by_scope[scope]) for slot, scope in senders.items()}
    return Structure(code=code, slots=tuple(slots), bytes=rank.bytes, per_sender=per_sender)
