"""The step of plans that use the same groups, as a compiled walk whose open durations depend on the plan.

One rank's program is built as the full walk builds it, for a plan of this structure. Lookups, updates and exchanges are
left open. So are the small kernels around them, which are tabulated once at several loads of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traincast.host.profile import HostProfile
from traincast.kernels.call import FloatArray
from traincast.kernels.cost import price
from traincast.kernels.lowered import lower_program
from traincast.kernels.registry import LoweringContext
from traincast.parallel.sharded_dlrm import FRAMEWORK, rank_program
from traincast.parallel.sharded_layout import Batch, Layout
from traincast.sharding.lookups import Group
from traincast.sharding.max_plus import Open, WalkCode, compile_walk
from traincast.sharding.memory import INDEX_BYTES
from traincast.sharding.plan import KINDS
from traincast.sharding.slots import PLAIN, Slot, find_slots
from traincast.sharding.task import Task
from traincast.simulate.exchanges import exchange_of
from traincast.simulate.schedule import Code, Schedule, build_schedule
from traincast.simulate.step import host_seconds
from traincast.workload.program import Program

RANK = 0  # whose program is compiled
LENGTH_BYTES = 4
LOADS = (0.0, 1 / 1024, 1 / 32, 1 / 8, 1 / 2, 2.0)
"""Loads of a rank, over the heaviest to be expected, at which the small kernels are tabulated. At 0 they take what they
take at least: the heaviest may be a copy of a huge table, thousands of times what a good plan copies."""


@dataclass(frozen=True, eq=False, slots=True)
class Around:
    """The small kernels around an open one: their `seconds` at each `load` of a rank, as `load_of` counts it; and its
    `lookups` there, in so many `rows`."""

    load: FloatArray
    seconds: FloatArray
    lookups: FloatArray
    rows: FloatArray


Surroundings = dict[Slot, Around]


def load_of(role: str, group: Group, samples: int, *, parts: Any, lookups: Any, elements: Any) -> Any:
    """What the small kernels around an open one grow with: bytes of lookups and their lengths; the sort of an update
    with its lookups; whatever is done to the gradients of data-parallel tables with their elements. Numbers or arrays.
    """
    if role in ("sort", "step"):
        return elements if group.copied else lookups
    return INDEX_BYTES * lookups + LENGTH_BYTES * samples * parts


@dataclass(frozen=True, eq=False, slots=True)
class Structure:
    """A compiled walk: `slots[i]` is open duration i, `bytes` are messages of the compiled plan.

    The open duration of a kernel includes what the small kernels around it take beyond the smallest of `LOADS`.
    """

    code: WalkCode
    slots: tuple[Slot, ...]
    bytes: dict[Slot, int]


def surroundings(
    task: Task, layout: Layout, groups: Sequence[Group], heaviest: Sequence[tuple[float, float]]
) -> Surroundings:
    """The small kernels of the groups of a layout, at `LOADS` times the lookups and elements that `heaviest` says."""
    alone, typical = replace(task, dense=None), _typical(layout)
    layouts = [_scaled(typical, load, groups, heaviest) for load in LOADS]
    ranks = [_Rank.of(alone, each, groups) for each in layouts]
    around = [rank.around() for rank in ranks]
    held = [_held(each, groups) for each in layouts]
    return {
        slot: Around(
            np.array([_load(slot, each, groups, task) for each in held]),
            np.array([rank.seconds[own[slot]].sum() for rank, own in zip(ranks, around, strict=True)]),
            np.array([float(sum(batch.lookups for batch in _own(slot, each, groups).values())) for each in held]),
            np.array([float(sum(batch.rows for batch in _own(slot, each, groups).values())) for each in held]),
        )
        for slot in around[0]
    }


def _own(slot: Slot, held: dict[int, Batch], groups: Sequence[Group]) -> dict[int, Batch]:
    """The batches that an open kernel belongs to: those of its group, or of its kind of sharding."""
    if slot.group >= 0:
        return {slot.group: held[slot.group]}
    return {group: batch for group, batch in held.items() if groups[group].kind == slot.kind}


def _load(slot: Slot, held: dict[int, Batch], groups: Sequence[Group], task: Task) -> float:
    """The load of a rank that looks these batches up, for one open kernel."""
    total = 0.0
    for group, batch in _own(slot, held, groups).items():
        samples = task.batch_size * (1 if groups[group].copied else task.gpus)
        total += load_of(
            slot.role, groups[group], samples, parts=batch.tables, lookups=batch.lookups, elements=batch.elements
        )
    return total


def build_structure(
    task: Task,
    layout: Layout,
    groups: Sequence[Group],
    host: HostProfile,
    around: Surroundings,
    senders: Mapping[int, int],
) -> Structure:
    """Compiles the walk of plans like the one laid out; `groups` are all that plans may use, in order. `senders` says
    how many ranks hold tables of a kind of sharding: each has its own part of the pooled rows."""
    rank = _Rank.of(task, _sent_by(_typical(layout), senders), groups)
    numbers = {slot: number for number, slot in enumerate(dict.fromkeys(rank.slots.values()))}
    opened = {at: Open(numbers[slot], slot.meeting) for at, slot in rank.slots.items()}
    seconds = rank.seconds.copy()
    seconds[[at for at, slot in rank.slots.items() if slot.role not in PLAIN]] = 0.0
    for slot, launches in rank.around().items():
        seconds[launches] *= min(1.0, around[slot].seconds[0] / max(float(seconds[launches].sum()), 1e-30))
    busy = host_seconds(rank.schedule, rank.program, host)
    code = compile_walk(rank.schedule, busy, seconds, opened, gap=task.device.kernel_gap)
    return Structure(code=code, slots=tuple(numbers), bytes=rank.bytes)


def _typical(layout: Layout) -> Layout:
    """The layout with a batch of every group on the compiled rank: its own, else that of a rank that has one."""
    sections = []
    for section in layout.sections:
        ranks = [list(batches) for batches in section.ranks]
        for form in dict.fromkeys(_form(batch) for batches in section.ranks for batch in batches):
            if not any(_form(batch) == form for batch in ranks[RANK]):
                donor = next(each for each in ranks if any(_form(batch) == form for batch in each))
                batch = next(each for each in donor if _form(each) == form)
                donor.remove(batch)
                ranks[RANK].append(batch)
        sections.append(replace(section, ranks=tuple(tuple(sorted(each, key=_form)) for each in ranks)))
    return replace(layout, sections=tuple(sections))


def _form(batch: Batch) -> tuple[str, str, bool, str]:
    return batch.kernel, batch.dtype, batch.weighted, batch.optimizer


def _sent_by(layout: Layout, senders: Mapping[int, int]) -> Layout:
    """The layout with the columns of whole and column-wise tables on so many ranks, about equally."""
    sections = []
    for section in layout.sections:
        count = senders.get(KINDS.index(section.kind), 0)
        if count:
            total, own = sum(section.columns), section.ranks[RANK]
            rest = max(total - count * len(own), 0)
            shares = [rest // count + (rank < rest % count) + len(own) for rank in range(count)]
            first = (replace(own[0], columns=shares[0] - len(own) + 1), *(replace(b, columns=1) for b in own[1:]))
            left = max(sum(section.lookups) - section.lookups[RANK], 0) // max(1, count - 1)
            parts = max(1, (sum(section.tables) - section.tables[RANK]) // max(1, count - 1))
            usual = replace(own[0], lookups=left, tables=parts)
            others = tuple((replace(usual, columns=share),) for share in shares[1:])
            empty = ((),) * (layout.world_size - count)
            section = replace(section, ranks=(first, *others, *empty))
        sections.append(section)
    return replace(layout, sections=tuple(sections))


def _held(layout: Layout, groups: Sequence[Group]) -> dict[int, Batch]:
    """What the compiled rank looks up, by number of the group."""
    numbers = {
        (KINDS[group.kind], group.kernel, group.dtype, group.weighted, group.optimizer): number
        for number, group in enumerate(groups)
    }
    return {
        numbers[(section.kind, *_form(batch))]: batch for section in layout.sections for batch in section.ranks[RANK]
    }


def _scaled(layout: Layout, load: float, groups: Sequence[Group], heaviest: Sequence[tuple[float, float]]) -> Layout:
    """The layout with `load` times the heaviest lookups on the compiled rank, in more tables, columns unchanged."""
    number = {id(batch): group for group, batch in _held(layout, groups).items()}
    sections = []
    for section in layout.sections:
        own = tuple(_scaled_batch(batch, load, *heaviest[number[id(batch)]]) for batch in section.ranks[RANK])
        sections.append(replace(section, ranks=(*section.ranks[:RANK], own, *section.ranks[RANK + 1 :])))
    return replace(layout, sections=tuple(sections))


def _scaled_batch(batch: Batch, load: float, lookups: float, elements: float) -> Batch:
    more = load * lookups / max(1, batch.lookups)
    grown = {
        name: max(1, round(more * getattr(batch, name)))
        for name in ("tables", "cached_elements", "lookups", "fetched_rows", "fetched_bytes")
    }
    values = tuple(round(more * value) for value in batch.load)
    return replace(batch, load=values, elements=max(1, round(load * elements)), **grown)


@dataclass(frozen=True, eq=False, slots=True)
class _Rank:
    """The program of the compiled rank, priced: `seconds` per instruction, `slots` by instruction; `copied` are the
    numbers of elements of data-parallel tables."""

    program: Program
    schedule: Schedule
    seconds: FloatArray
    slots: dict[int, Slot]
    bytes: dict[Slot, int]
    copied: frozenset[int]

    @staticmethod
    def of(task: Task, layout: Layout, groups: Sequence[Group]) -> _Rank:
        program = rank_program(layout, RANK, task.dense, task.tables)
        major, minor = FRAMEWORK.split(".")
        lowered = lower_program(program, LoweringContext(framework_version=(int(major), int(minor)), tf32=False))
        schedule = build_schedule(program, lowered)
        launches = schedule.code == Code.LAUNCH
        seconds = np.zeros(len(schedule.code))
        seconds[launches] = price(lowered, task.device).seconds[schedule.call[launches]]
        held = _held(layout, groups)
        names = [program.symbolic[i].name for i in program.columns.op_signature.tolist()]
        used = [(groups[number].kind, number) for number in held]
        slots = find_slots(names, schedule, lowered, used, across=layout.nodes > 1)
        signatures = program.columns.op_signature
        sizes = {
            slot: exchange_of(program.signatures[signatures[schedule.op[at]]], "fp32").bytes
            for at, slot in slots.items()
            if slot.meeting
        }
        copied = frozenset(batch.elements for number, batch in held.items() if groups[number].copied)
        return _Rank(program, schedule, seconds, slots, sizes, copied)

    def around(self) -> dict[Slot, list[int]]:
        """The kernels that go with each open one: of the same op, those that lead up to it, and what is done to the
        gradients of data-parallel tables before and after their exchange."""
        kernels: dict[Slot, list[int]] = {slot: [] for slot in self.slots.values() if not slot.meeting}
        ops = {int(self.schedule.op[at]): s for at, s in self.slots.items() if s in kernels and s.role != "backward"}
        names = [self.program.symbolic[i].name for i in self.program.columns.op_signature.tolist()]
        waiting: list[int] = []
        copied: Slot | None = None
        for at in np.flatnonzero(self.schedule.code == Code.LAUNCH).tolist():
            op, slot = int(self.schedule.op[at]), self.slots.get(at)
            if slot is not None and slot.meeting:
                waiting = []  # what ran before an exchange is no part of what comes after
            elif op in ops:
                own = ops[op]
                kernels[own] += [*waiting, *([at] if slot is None or slot.role in PLAIN else [])]
                waiting = []
                copied = own if own.role in ("sort", "step") and KINDS[own.kind] == "data_parallel" else copied
            elif names[op].startswith("fbgemm::"):
                waiting.append(at)
            elif copied is not None and self._on_copies(op):
                kernels[copied].append(at)
        return kernels

    def _on_copies(self, op: int) -> bool:
        """Whether an op works on the weights or gradients of data-parallel tables."""
        signature = self.program.signatures[self.program.columns.op_signature[op]]
        return any(spec.numel in self.copied for spec in signature.inputs)
