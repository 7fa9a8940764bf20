"""The step of plans that use the same groups: one rank's program, priced and compiled, whose open durations depend on
the plan.

What a scope is there for is what its writer marked it as.

One rank's program is built as the full simulation does, for a plan of this structure. Lookups, updates and collectives
are left open. So are the small kernels around them, which are tabulated once at several loads of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traincast.costs.host.profile import ALONE, HostProfile
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.cost import price_in_step
from traincast.costs.kernels.lower import LoweredProgram, lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.ir.program import Program
from traincast.ir.workload import DEFAULT_FRAMEWORK
from traincast.models.data_parallel.data_parallel import BUCKET_BYTES
from traincast.models.embeddings.table import ITEM_BYTES
from traincast.models.placement.memory import INDEX_BYTES, LENGTH_BYTES
from traincast.models.placement.plan import ComputeKernel, ShardingKind
from traincast.models.sharded_dlrm.layout import Batch, Layout, Mark, ScopeRole, Section
from traincast.models.sharded_dlrm.step import build_sharded_rank_program
from traincast.planner.sharding.lookups import TableGroup
from traincast.planner.sharding.max_plus import EXCHANGES, SMALL, Part, SimulationCode, Skip, Slot, compile_simulation
from traincast.planner.sharding.result import Task
from traincast.simulator.collective_calls import read_collective
from traincast.simulator.prediction.step import list_host_seconds
from traincast.simulator.schedule import Code, Schedule, build_schedule
from traincast.utils.arrays import FloatArray

RANK = 0
"""The rank whose program is compiled."""


@dataclass(frozen=True, slots=True)
class Heaviest:
    """What a rank may have in a group at most, about: parts of tables, lookups, elements, and pooled columns."""

    tables: float
    lookups: float
    elements: float
    columns: float


def merge_layouts(layouts: Sequence[Layout]) -> Layout:
    """One layout with the batches of all: of each kind and form those of the first that has them."""
    sections: dict[ShardingKind, Section] = {}
    for section in (section for layout in layouts for section in layout.sections):
        before = sections.setdefault(section.kind, section)
        known = {get_batch_form(batch) for batches in before.ranks for batch in batches}
        ranks = [
            (*batches, *(batch for batch in more if get_batch_form(batch) not in known))
            for batches, more in zip(before.ranks, section.ranks, strict=True)
        ]
        sections[section.kind] = replace(before, ranks=tuple(ranks))
    return replace(layouts[0], sections=tuple(sections[kind] for kind in ShardingKind if kind in sections))


def make_typical_layout(layout: Layout, columns: int) -> Layout:
    """The layout with a batch of every group on the compiled rank, its own or one like that of another rank, and
    nothing on other ranks where they may lack tables; nearly all of the `columns` are the first batch's."""
    left, sections = columns, []
    for section in layout.sections:
        first = {get_batch_form(batch): batch for batches in reversed(section.ranks) for batch in reversed(batches)}
        batches = tuple(replace(first[form], columns=1) for form in sorted(first))
        left -= len(batches)
        sections.append(replace(section, ranks=_spread_batches(section.kind, layout, batches)))
    head = sections[0].ranks[RANK]
    wide = (replace(head[0], columns=max(1, left + 1)), *head[1:])
    sections[0] = replace(sections[0], ranks=_spread_batches(sections[0].kind, layout, wide))
    return replace(layout, sections=tuple(sections))


def _spread_batches(kind: ShardingKind, layout: Layout, batches: tuple[Batch, ...]) -> tuple[tuple[Batch, ...], ...]:
    """The batches of all ranks, given those of the compiled one: it shares tables with all, with its node, or with
    nobody."""
    mates = kind.count_sharers(layout.world_size, layout.gpus_per_node)
    return (batches,) * mates + ((),) * (layout.world_size - mates)


def get_batch_form(batch: Batch) -> tuple[ComputeKernel, str, bool, str]:
    """What tables must have in common to share a kernel."""
    return batch.kernel, batch.dtype, batch.weighted, batch.optimizer


def list_held_batches(layout: Layout, groups: Sequence[TableGroup]) -> dict[int, Batch]:
    """What the compiled rank looks up, by number of the group."""
    numbers = {group: number for number, group in enumerate(groups)}
    return {
        numbers[TableGroup(section.kind, *get_batch_form(batch))]: batch
        for section in layout.sections
        for batch in section.ranks[RANK]
    }


def make_least_layout(layout: Layout) -> Layout:
    """The layout with sorts of as few launches as there can be: a plan adds those that it needs. Several groups of
    data-parallel tables fill a bucket of gradients each."""
    sections = []
    for section in layout.sections:
        full = len(section.ranks[RANK]) > 1 and section.kind.copied
        least = [
            tuple(_make_least_batch(batch, layout.world_size, full) for batch in batches) for batches in section.ranks
        ]
        sections.append(replace(section, ranks=tuple(least)))
    return replace(layout, sections=tuple(sections))


def _make_least_batch(batch: Batch, lookups: int, full: bool) -> Batch:
    """One lookup for the samples of each rank: without any, its kernels would not be launched."""
    elements = BUCKET_BYTES[-1] // ITEM_BYTES[batch.dtype] if full else batch.elements
    load = tuple(min(value, lookups) for value in batch.load)
    return replace(batch, rows=1, lookups=lookups, load=load, elements=elements)


def scale_layout(layout: Layout, load: float, groups: Sequence[TableGroup], heaviest: Sequence[Heaviest]) -> Layout:
    """The layout with `load` times the heaviest lookups, elements and columns, in more tables. Ranks without tables
    get lookups too, so that as many arrive as are sent, but no columns: the compiled rank stays the only sender."""
    number = {id(batch): group for group, batch in list_held_batches(layout, groups).items()}
    sections = []
    for section in layout.sections:
        heavy = tuple(_scale_batch(batch, load, heaviest[number[id(batch)]]) for batch in section.ranks[RANK])
        silent = tuple(replace(batch, columns=0) for batch in heavy)
        ranks = [heavy if batches else silent for batches in section.ranks]
        sections.append(replace(section, ranks=tuple(ranks)))
    return replace(layout, sections=tuple(sections))


def _scale_batch(batch: Batch, load: float, heaviest: Heaviest) -> Batch:
    more = load * heaviest.lookups / max(1, batch.lookups)
    values = tuple(round(more * value) for value in batch.load)
    return replace(
        batch,
        load=values,
        tables=max(1, round(load * heaviest.tables)),
        lookups=max(1, round(load * heaviest.lookups)),
        elements=max(1, round(load * heaviest.elements)),
        columns=max(1, round(load * heaviest.columns)),
        cached_elements=max(1, round(more * batch.cached_elements)),
        fetched_rows=min(1, batch.fetched_rows),  # bytes from the host are counted on their own
        fetched_bytes=min(1, batch.fetched_bytes),
    )


EMPTY = "aten::new_empty"
"""What a rank without tables of a kind runs in place of their lookups."""
_NEEDED = {
    ScopeRole.ARRIVE: 1,
    ScopeRole.LOOKUP: 1,
    ScopeRole.FLATTEN: 1,
    ScopeRole.SHAPE: 1,
    ScopeRole.UPDATE: 1,
    ScopeRole.STEP: 1,
    ScopeRole.BESIDE: 2,
    ScopeRole.PART: 2,
}
"""Scopes that some ranks do not run, and how many groups of a kind a rank has at least that does."""


@dataclass(frozen=True, eq=False, slots=True)
class RankProgram:
    """The program of the compiled rank: `seconds` per instruction, the `marks` of its scopes, `slots` by instruction,
    `around` (the launches of small kernels that go with each open one), `bytes` of collectives; `groups` are those in
    use by kind, `cached` the numbers of those with a cache on the device."""

    program: Program
    schedule: Schedule
    seconds: FloatArray
    marks: tuple[Mark | None, ...]
    slots: dict[int, Slot]
    around: dict[Slot, list[int]]
    bytes: dict[Slot, int]
    groups: dict[ShardingKind, list[int]]
    cached: frozenset[int]

    @staticmethod
    def of(task: Task, layout: Layout, groups: Sequence[TableGroup]) -> RankProgram:
        """The program of the compiled rank under a layout."""
        marked = build_sharded_rank_program(layout, RANK, task.dense, task.tables)
        program = marked.program
        major, minor = DEFAULT_FRAMEWORK.split(".")
        lowered = lower_program(program, LoweringContext(framework_version=(int(major), int(minor)), tf32=False))
        schedule = build_schedule(program, lowered)
        launches = schedule.code == Code.LAUNCH
        seconds = np.zeros(len(schedule.code))
        seconds[launches] = price_in_step(lowered, task.device).seconds[schedule.call[launches]]
        used: dict[ShardingKind, list[int]] = {}
        for number in list_held_batches(layout, groups):
            used.setdefault(groups[number].kind, []).append(number)
        slots, around = _make_slots(_list_open_launches(schedule, lowered, marked.marks, used))
        signatures = program.columns.op_signature
        sizes = {
            slot: read_collective(program.signatures[signatures[schedule.op[at]]], "fp32").bytes
            for at, slot in slots.items()
            if slot.collective
        }
        cached = frozenset(number for numbers in used.values() for number in numbers if groups[number].kernel.cached)
        return RankProgram(program, schedule, seconds, marked.marks, slots, around, sizes, used, cached)

    def list_host_work(self) -> tuple[dict[int, Slot], dict[Slot, int]]:
        """Before which instructions the host may have more to do; and the scope that each sender has one of."""
        senders = {
            Slot(Part.VIEWS, mark.kind): scope
            for scope, mark in enumerate(self.marks)
            if mark is not None and mark.role is ScopeRole.VIEW and mark.kind and not mark.kind.everywhere
        }
        late = {}
        for at, slot in self.slots.items():
            if slot.role is ScopeRole.JOIN and slot.kind and not slot.kind.everywhere:
                senders[Slot(Part.GRADIENTS, slot.kind)] = int(self.schedule.scope[at])
            elif slot.role is Part.BACKWARD:
                late[at] = Slot(Part.LAUNCHES, slot.kind, slot.group)
            elif slot.role is ScopeRole.LOOKUP and slot.group in self.cached:
                late[at] = Slot(Part.FILLS, slot.kind, slot.group)
        for slot, scope in senders.items():
            late[int(np.searchsorted(self.schedule.scope, scope, side="right")) - 1] = slot
        return late, senders

    def list_skips(self, empty: float) -> list[Skip]:
        """What ranks without tables of some group or kind do not run: scopes of equal needs side by side, together. In
        place of their lookups such a rank runs `EMPTY`, which takes `empty` seconds."""
        begin = np.searchsorted(self.schedule.scope, np.arange(len(self.marks) + 1)).tolist()
        runs: list[Skip] = []
        for scope, mark in enumerate(self.marks):
            slot = None if mark is None else self._held(mark)
            if mark is None or slot is None:
                continue
            first, instead = begin[scope], empty * (mark.role is ScopeRole.FLATTEN)
            if runs and runs[-1].last == first and runs[-1].slot == slot:
                before = runs.pop()
                first, instead = before.first, max(instead, before.instead)
            runs.append(Skip(first, begin[scope + 1], slot, instead))
        return runs

    def _held(self, mark: Mark) -> Slot | None:
        """The group, or how many groups of its kind, that a rank needs to run a scope; None if every rank runs it."""
        if mark.role not in _NEEDED or mark.kind is None:
            return None
        numbers, least = self.groups[mark.kind], _NEEDED[mark.role]
        if mark.kind.everywhere and (len(numbers) == 1 or (mark.batch < 0 and least == 1)):
            return None
        if len(numbers) == 1 or mark.batch >= 0:
            return Slot(Part.HELD, mark.kind, numbers[max(mark.batch, 0)])
        return Slot(Part.HELD, mark.kind, -1, least)


def _list_open_launches(
    schedule: Schedule, lowered: LoweredProgram, marks: Sequence[Mark | None], groups: dict[ShardingKind, list[int]]
) -> Iterator[tuple[int, Slot, bool]]:
    """The launches that a plan decides: where, what they belong to, and whether they are the open one of that."""
    seen: set[Slot] = set()
    for at in np.flatnonzero(schedule.code == Code.LAUNCH).tolist():
        mark, call = marks[schedule.scope[at]], lowered.calls[schedule.call[at]]
        role = None if mark is None else _find_scope_role(mark, call)
        if mark is None or role is None:
            continue
        number = len(seen) if role is ScopeRole.DENSE else mark.number  # a bucket of gradients each
        group = -1 if mark.kind is None or mark.batch < 0 else groups[mark.kind][mark.batch]
        slot = Slot(role, mark.kind, group, number)
        # of small kernels that go together the first is open; of a lookup the kernel that looks up
        yield (
            at,
            slot,
            slot not in seen if role in SMALL else role is not ScopeRole.LOOKUP or call.kind == "tbe_forward",
        )
        seen.add(slot)


def _make_slots(launches: Iterable[tuple[int, Slot, bool]]) -> tuple[dict[int, Slot], dict[Slot, list[int]]]:
    """The open launches, and the small kernels that go with each."""
    slots: dict[int, Slot] = {}
    around: dict[Slot, list[int]] = {}
    for at, slot, is_open in launches:
        if is_open:
            slots[at] = slot
        if not slot.collective and (slot.role in SMALL or not is_open):
            around.setdefault(slot, []).append(at)
    # terms of a report are summed in this order: what joins gradients counts with the collective that it is for
    back = {slot.kind: at for at, slot in slots.items() if slot.role is ScopeRole.BACK}
    order = {at: back.get(slot.kind, at) if slot.role is ScopeRole.JOIN else at for at, slot in slots.items()}
    return {at: slots[at] for at in sorted(slots, key=lambda at: (order[at], -at))}, around


def _find_scope_role(mark: Mark, call: KernelCall) -> ScopeRole | Part | None:
    """The role of a launch in a scope: what the plan decides there is the collective, or the kernels; of an update its
    sort, the kernel itself, and the collective of its gradient. None for what it does not decide."""
    exchange = call.family is COLLECTIVE
    if mark.role is ScopeRole.UPDATE:
        return Part.COPIES if exchange else Part.BACKWARD if call.kind.startswith("tbe_backward") else Part.SORT
    return mark.role if exchange == (mark.role in EXCHANGES) else None


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
    """A compiled simulation: `slots` are its open durations, `bytes` are messages of the plan, `per_sender` the
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
