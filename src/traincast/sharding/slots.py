"""Which launches of a sharded step last as long as the plan decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.kernels.families import COLLECTIVE, EMBEDDING
from traincast.kernels.lowered import LoweredProgram
from traincast.placement.plan import KINDS
from traincast.walk.schedule import Code, Schedule


@dataclass(frozen=True, slots=True)
class Slot:
    """An open duration: `role` of a kind of sharding (number in `KINDS`), and which of its groups where it has several.

    Roles of kernels: `order` (all lookups by where they go), `bucket` (by blocks of rows), `arrive`, `forward`,
    `beside` (what several groups pooled), `join` (gradients by where they go), `sort`, `backward`, `step` (of
    data-parallel tables). Of exchanges: `sizes`, `lengths`, `values`, `out`, `out_across`, `back`, `back_within`,
    `copies` (gradients of data-parallel tables) and `dense` (gradients of the dense part). Of host work: `views` and
    `parts` (of pooled rows and gradients, one a sender), `launches` (of the sort), `fills` (of the cache of tables in
    host memory). `held` is 1 on ranks that have tables of a group. `number` tells several of one role apart.
    """

    role: str
    kind: int
    group: int = -1
    number: int = 0

    @property
    def meeting(self) -> str:
        """Who meets, as `max_plus.Open` says; "" for kernels and host work."""
        if self.role in KERNELS or self.role in _HOST:
            return ""
        if KINDS[self.kind] == "table_row_wise":
            return _NODE_MEETINGS.get(self.role, "world")
        return "world"


KERNELS = ("order", "bucket", "arrive", "forward", "beside", "join", "sort", "backward", "step")
"""Roles of kernels."""
PLAIN = ("order", "bucket", "arrive", "beside", "join", "sort", "step")
"""Roles of open kernels that are themselves among the small ones."""
_HOST = ("views", "parts", "launches", "fills", "held")
_NODE_MEETINGS = {"out": "within", "out_across": "across", "back": "across", "back_within": "within"}
_BY_ROWS = ("row_wise", "table_row_wise")
_ORDER, _BUCKET = "fbgemm::permute_2D_sparse_data", "fbgemm::block_bucketize_sparse_features"


def find_slots(
    names: Sequence[str],
    scopes: Sequence[str],
    schedule: Schedule,
    lowered: LoweredProgram,
    groups: Sequence[tuple[int, int]],
    *,
    across: bool,
) -> dict[int, Slot]:
    """Which launches are open, by the order in which a sharded step makes them; `names` are those of ops, `scopes` of
    top-level ones, `groups` are (kind, number), `across` says that there is more than one node."""
    finder = _Finder(schedule, lowered, groups, across)
    finder.steps = _steps(scopes, groups)
    for at in np.flatnonzero(schedule.code == Code.LAUNCH).tolist():
        finder.launch(at, names[schedule.op[at]])
    return finder.slots


class _Finder:
    """Goes through the launches of a step."""

    def __init__(
        self, schedule: Schedule, lowered: LoweredProgram, groups: Sequence[tuple[int, int]], across: bool
    ) -> None:
        self.slots: dict[int, Slot] = {}
        self._schedule, self._lowered = schedule, lowered
        sent = list(dict.fromkeys(kind for kind, _ in groups if KINDS[kind] != "data_parallel"))
        self._forward = iter([Slot("forward", kind, group) for kind, group in groups])
        last_first = sorted(groups, key=lambda each: -each[0])  # sections in reverse, their groups in order
        self._backward = iter([Slot("backward", kind, group) for kind, group in last_first])
        tensors = _tensors(schedule, lowered, sent)
        self._exchanges = iter(_exchange_slots(sent, tensors=tensors, across=across))
        self._buckets = iter([Slot("bucket", kind) for kind in sent if KINDS[kind] in _BY_ROWS])
        several = [kind for kind in dict.fromkeys(kind for kind, _ in groups) if [k for k, _ in groups].count(kind) > 1]
        self._beside = {kind: [number for k, number in groups if k == kind][-1] for kind in several}
        launches = np.flatnonzero(schedule.code == Code.LAUNCH).tolist()
        self._updates = {
            int(schedule.op[at]) for at in launches if lowered.calls[schedule.call[at]].kind.startswith("tbe_back")
        }
        self.steps: dict[int, Slot] = {}
        self._reduced, self._arrived, self._clone, self._op = 0, -1, -1, -1
        self._latest, self._looked_up = Slot("", 0), Slot("", 0)

    def launch(self, at: int, name: str) -> None:
        """Takes one more launch, of the op of this name."""
        call, op = self._lowered.calls[self._schedule.call[at]], int(self._schedule.op[at])
        first, self._op = op != self._op, op  # of its op
        if op in self._updates:
            self._updates.remove(op)
            self._latest = next(self._backward)
            self.slots[at] = replace(self._latest, role="sort")
        elif call.family is COLLECTIVE:
            self._collective(at, name)
        elif call.family is EMBEDDING:
            self._looked_up = next(self._forward) if call.kind == "tbe_forward" else self._looked_up
            self.slots[at] = self._looked_up if call.kind == "tbe_forward" else self._latest
        elif name == _ORDER and first and (self._arrived >= 0 or not self.slots):
            self.slots[at] = Slot("arrive", self._arrived) if self.slots else Slot("order", 0)
            self._arrived = -1
        elif name == _BUCKET and first:
            self.slots[at] = next(self._buckets)
        elif name == "aten::cat" and first and self._beside.get(self._looked_up.kind) == self._looked_up.group:
            self.slots[at] = Slot("beside", self._looked_up.kind)
            del self._beside[self._looked_up.kind]
        elif name == "aten::clone":
            self._clone = at
        elif int(self._schedule.scope[at]) in self.steps:
            self.slots[at] = self.steps.pop(int(self._schedule.scope[at]))

    def _collective(self, at: int, name: str) -> None:
        if name == "c10d::allreduce_":
            kind, group = self._latest.kind, self._latest.group
            copies = self._latest.role == "backward" and KINDS[kind] == "data_parallel"
            self.slots[at] = Slot("copies", kind, group) if copies else Slot("dense", 0, -1, self._reduced)
            self._reduced += 1
            return
        slot = self.slots[at] = next(self._exchanges)
        self._arrived = slot.kind if slot.role == "values" else self._arrived
        if self._clone >= 0 and slot.role == "back":
            self.slots[self._clone] = Slot("join", slot.kind)
            self._clone = -1


def _steps(scopes: Sequence[str], groups: Sequence[tuple[int, int]]) -> dict[int, Slot]:
    """The scopes in which copied tables are updated: the last steps of an optimizer, one a group."""
    copied = [Slot("step", kind, group) for kind, group in groups if KINDS[kind] == "data_parallel"]
    steps = [number for number, name in enumerate(scopes) if name.startswith("Optimizer.step#")]
    return dict(zip(steps[len(steps) - len(copied) :], copied, strict=True))


def _tensors(schedule: Schedule, lowered: LoweredProgram, sent: Sequence[int]) -> int:
    """How many tensors each kind of sharding exchanges before the lookups: lengths, row numbers, and maybe weights."""
    count = 0
    for at in np.flatnonzero(schedule.code == Code.LAUNCH).tolist():
        call = lowered.calls[schedule.call[at]]
        if call.family is EMBEDDING:
            break
        count += call.family is COLLECTIVE
    return max(2, count // max(1, len(sent)) - 1)


def _exchange_slots(sent: Sequence[int], *, tensors: int, across: bool) -> list[Slot]:
    """The exchanges of a step in order; `tensors` are exchanged for each kind of sharding before the lookups."""
    slots: list[Slot] = []
    for kind in sent:
        slots += [Slot("sizes", kind), Slot("lengths", kind)]
        slots += [Slot("values", kind, -1, number) for number in range(tensors - 1)]
    for kind in sent:
        node = KINDS[kind] == "table_row_wise"
        slots += [Slot("out", kind), *([Slot("out_across", kind)] if node and across else [])]
    slots += [Slot("back", kind) for kind in reversed(sent) if across or KINDS[kind] != "table_row_wise"]
    return [*slots, *(Slot("back_within", kind) for kind in sent if KINDS[kind] == "table_row_wise")]
