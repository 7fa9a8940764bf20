"""One rank's program, priced, with what a plan decides: open launches, the small kernels around them, host work that
grows with the plan, and instructions that ranks without some tables do not have.

What a scope is there for is what its writer marked it as."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.cost import price_in_step
from traincast.costs.kernels.lowered import LoweredProgram, lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.ir.program import Program
from traincast.ir.workload import DEFAULT_FRAMEWORK
from traincast.models.placement.kinds import ShardingKind
from traincast.models.sharded_dlrm.layout import Layout
from traincast.models.sharded_dlrm.marks import Mark, ScopeRole
from traincast.models.sharded_dlrm.step import build_sharded_rank_program
from traincast.planner.sharding.layouts import RANK, list_held_batches
from traincast.planner.sharding.lookups import TableGroup
from traincast.planner.sharding.max_plus import Skip
from traincast.planner.sharding.slots import EXCHANGES, SMALL, Part, Slot
from traincast.planner.sharding.task import Task
from traincast.simulator.collective_calls import read_collective
from traincast.simulator.schedule import Code, Schedule, build_schedule
from traincast.utils.arrays import FloatArray

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
