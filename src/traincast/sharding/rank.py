"""One rank's program, priced, with what a plan decides marked: open launches, the small kernels around them, host work
that grows with the plan, and instructions that ranks without some tables do not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.arrays import FloatArray
from traincast.kernels.cost import price
from traincast.kernels.lowered import lower_program
from traincast.kernels.registry import LoweringContext
from traincast.placement.plan import KINDS
from traincast.programs.sharded.layout import Layout
from traincast.programs.sharded.step import FRAMEWORK, rank_program
from traincast.sharding.layouts import RANK, SENDING, held
from traincast.sharding.lookups import Group
from traincast.sharding.slots import PLAIN, Slot, find_slots
from traincast.sharding.task import Task
from traincast.walk.collective_calls import exchange_of
from traincast.walk.schedule import Code, Schedule, build_schedule
from traincast.workload.program import Program

EMPTY = "aten::new_empty"
"""What a rank without tables of a kind runs in place of their lookups."""
_CUMSUM = "fbgemm::asynchronous_complete_cumsum"
_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_LEADS = (
    "aten::to",
    "fbgemm::bounds_check_indices",
    "fbgemm::linearize_cache_indices",
    "fbgemm::lru_cache_populate",
    "fbgemm::lxu_cache_lookup",
)  # scopes before a lookup that belong to it


@dataclass(frozen=True, slots=True)
class Stretch:
    """Instructions [first, last) of ranks on which `slot` (of role `held`) is not 0; others run `EMPTY` in their place
    if `replaced`."""

    first: int
    last: int
    slot: Slot
    replaced: bool


@dataclass(frozen=True, eq=False, slots=True)
class RankProgram:
    """The program of the compiled rank: `seconds` per instruction, `slots` by instruction, `bytes` of exchanges; `used`
    are the groups, (kind, number), `cached` the numbers of those with a cache on the device, `copied` the numbers of
    elements of data-parallel tables."""

    program: Program
    schedule: Schedule
    seconds: FloatArray
    slots: dict[int, Slot]
    bytes: dict[Slot, int]
    used: tuple[tuple[int, int], ...]
    cached: frozenset[int]
    copied: frozenset[int]

    @staticmethod
    def of(task: Task, layout: Layout, groups: Sequence[Group]) -> RankProgram:
        """The program of the compiled rank under a layout."""
        program = rank_program(layout, RANK, task.dense, task.tables)
        major, minor = FRAMEWORK.split(".")
        lowered = lower_program(program, LoweringContext(framework_version=(int(major), int(minor)), tf32=False))
        schedule = build_schedule(program, lowered)
        launches = schedule.code == Code.LAUNCH
        seconds = np.zeros(len(schedule.code))
        seconds[launches] = price(lowered, task.device).seconds[schedule.call[launches]]
        batches = held(layout, groups)
        used = tuple((groups[number].kind, number) for number in batches)
        names = [program.symbolic[i].name for i in program.columns.op_signature.tolist()]
        scopes = [program.names[i] for i in program.columns.scope_name.tolist()]
        slots = find_slots(names, scopes, schedule, lowered, used, across=layout.nodes > 1)
        signatures = program.columns.op_signature
        sizes = {
            slot: exchange_of(program.signatures[signatures[schedule.op[at]]], "fp32").bytes
            for at, slot in slots.items()
            if slot.meeting
        }
        copied = frozenset(batch.elements for number, batch in batches.items() if groups[number].copied)
        cached = frozenset(number for number in batches if groups[number].kernel == "fused_uvm_caching")
        return RankProgram(program, schedule, seconds, slots, sizes, used, cached, copied)

    def around(self) -> dict[Slot, list[int]]:
        """The kernels that go with each open one: of the same op, those that lead up to it, and what is done to the
        gradients of data-parallel tables before and after their exchange and in their optimizer."""
        kernels: dict[Slot, list[int]] = {slot: [] for slot in self.slots.values() if not slot.meeting}
        ops = {int(self.schedule.op[at]): s for at, s in self.slots.items() if s in kernels and s.role != "backward"}
        names = [self.program.symbolic[i].name for i in self.program.columns.op_signature.tolist()]
        waiting: list[int] = []
        lengths = iter(self._lengths(names))
        steps = {int(self.schedule.scope[at]): s for at, s in self.slots.items() if s.role == "step"}
        back = iter(steps.values())  # copies out of the buckets come in the order of the groups
        copied: Slot | None = None
        joined: Slot | None = None
        for at in np.flatnonzero(self.schedule.code == Code.LAUNCH).tolist():
            op, slot = int(self.schedule.op[at]), self.slots.get(at)
            if slot is not None and slot.meeting:
                waiting, joined = [], None  # what ran before an exchange is no part of what comes after
            elif int(self.schedule.scope[at]) in steps:
                kernels[steps[int(self.schedule.scope[at])]].append(at)
            elif op in ops:
                own = ops[op]
                kernels[own] += [*waiting, *([at] if slot is None or slot.role in PLAIN else [])]
                waiting = []
                joined = own if own.role == "join" else None
                copied = own if own.role == "sort" and KINDS[own.kind] == "data_parallel" else copied
            elif names[op] == _CUMSUM:
                kernels[next(lengths)].append(at)
            elif names[op].startswith("fbgemm::"):
                waiting.append(at)
            elif joined is not None and names[op] == "aten::cat":
                kernels[joined].append(at)
            elif copied is not None and self._on_copies(op):
                copied = next(back, copied) if names[op] == "aten::copy_" else copied
                kernels[copied].append(at)
        return kernels

    def _lengths(self, names: Sequence[str]) -> list[Slot]:
        """The lookup for which each launch of a prefix sum of lengths is: every group has one op of them, in order."""
        at = np.flatnonzero(self.schedule.code == Code.LAUNCH)
        ops = [int(op) for op in self.schedule.op[at].tolist() if names[op] == _CUMSUM]
        order = {op: number for number, op in enumerate(dict.fromkeys(ops))}
        return [Slot("forward", *self.used[order[op]]) for op in ops]

    def _on_copies(self, op: int) -> bool:
        """Whether an op works on the weights or gradients of data-parallel tables."""
        signature = self.program.signatures[self.program.columns.op_signature[op]]
        return any(spec.numel in self.copied for spec in signature.inputs)

    def scopes(self) -> list[str]:
        """The name of every top-level op, in order."""
        return [self.program.names[i] for i in self.program.columns.scope_name.tolist()]

    def _slot_of_scope(self) -> dict[int, Slot]:
        """The last open kernel of every scope; what several scopes share is left out."""
        return {int(self.schedule.scope[at]): slot for at, slot in sorted(self.slots.items()) if not slot.meeting}

    def host_work(self) -> tuple[dict[int, Slot], dict[Slot, int]]:
        """Before which instructions the host may have more to do; and the scope that each sender has one of."""
        late, each = {}, {}
        names, of_scope = self.scopes(), self._slot_of_scope()
        views = iter([kind for kind in dict.fromkeys(kind for kind, _ in self.used) if KINDS[kind] in SENDING])
        last = np.searchsorted(self.schedule.scope, np.arange(len(names)), side="right") - 1
        for scope, (name, after) in enumerate(zip(names, [*names[1:], ""], strict=True)):
            slot = of_scope.get(scope)
            if name == "aten::split_with_sizes" and after == "aten::view":
                kind = next(views, None)
                if kind is not None:
                    late[int(last[scope + 1])] = Slot("views", kind)
                    each[Slot("views", kind)] = scope + 1
            elif slot is not None and slot.role == "join" and KINDS[slot.kind] in SENDING:
                late[int(last[scope])] = Slot("parts", slot.kind)
                each[Slot("parts", slot.kind)] = scope
        for at, slot in self.slots.items():
            role = {"backward": "launches", "forward": "fills" if slot.group in self.cached else ""}.get(slot.role)
            if role:
                late[at] = Slot(role, slot.kind, slot.group)
        return late, each

    def stretches(self) -> list[Stretch]:
        """What ranks without tables of some group or kind do not run."""
        names, of_scope = self.scopes(), self._slot_of_scope()
        tags: list[tuple[Slot, bool] | None] = [None] * len(names)
        lengths = iter(self.used)
        copied = iter([own for own in self.used if KINDS[own[0]] == "data_parallel"])
        for scope, name in enumerate(names):
            slot = of_scope.get(scope)
            if name == _CUMSUM:
                tags[scope] = self._tag(*next(lengths))
            elif name == _COPY_BACK:
                own = self._tag(*next(copied, (-1, -1)))
                tags[scope - 2 : scope + 1] = [own] * 3  # the wait for its bucket, a view of that, and the copy
            elif slot is None:
                continue
            elif slot.role == "arrive":
                tags[scope] = self._tag(slot.kind)
            elif slot.role in ("forward", "backward", "step"):
                tags[scope] = self._tag(slot.kind, slot.group)
                self._beside(tags, names, scope, slot)
        return self._runs(tags)

    def _beside(self, tags: list[tuple[Slot, bool] | None], names: Sequence[str], scope: int, slot: Slot) -> None:
        """Marks what belongs to a group's lookup or update beside it, and what several groups of a kind share."""
        several, one = self._tag(slot.kind, -1, 2), self._tag(slot.kind, -1)
        replaced = None if one is None else (one[0], True)
        if slot.role == "forward":
            before = scope - 1
            while names[before] in _LEADS and tags[before] is None:
                tags[before] = tags[scope]
                before -= 1
            marks, step = [("aten::cat", several), ("aten::reshape", replaced)], 1
        else:
            marks, step = [("CatBackward0", several), ("ViewBackward0", one)], -1
            if names[scope + 1 : scope + 2] == ["torch::autograd::AccumulateGrad"]:
                tags[scope + 1] = tags[scope]
        at = scope + step
        for name, tag in marks:
            if at < len(names) and names[at] == name and tags[at] is None:
                tags[at] = tag
                at += step

    def _tag(self, kind: int, group: int = -1, least: int = 1) -> tuple[Slot, bool] | None:
        """Where a rank needs a group, or so many groups of a kind; None if every rank has that."""
        own = [number for k, number in self.used if k == kind]
        if not own or (KINDS[kind] not in SENDING and (len(own) == 1 or (group < 0 and least == 1))):
            return None
        group = own[0] if len(own) == 1 else group
        return Slot("held", kind, group, 0 if group >= 0 else least), False

    def _runs(self, tags: Sequence[tuple[Slot, bool] | None]) -> list[Stretch]:
        """Neighbours of equal tags together, as instructions."""
        begin = np.searchsorted(self.schedule.scope, np.arange(len(tags) + 1))
        runs: list[Stretch] = []
        for scope, tag in enumerate(tags):
            if tag is None:
                continue
            first, last, (slot, replaced) = int(begin[scope]), int(begin[scope + 1]), tag
            if runs and runs[-1].last == first and runs[-1].slot == slot:
                first, replaced = runs[-1].first, replaced or runs[-1].replaced
                runs.pop()
            runs.append(Stretch(first, last, slot, replaced))
        return runs
