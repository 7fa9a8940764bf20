"""Which launches of a sharded step last as long as the plan decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.kernels.families import COLLECTIVE, EMBEDDING
from traincast.kernels.lowered import LoweredProgram
from traincast.sharding.plan import KINDS
from traincast.simulate.schedule import Code, Schedule


@dataclass(frozen=True, slots=True)
class Slot:
    """An open duration: `role` of a kind of sharding (number in `KINDS`), and which of its groups where it has several.

    Roles of kernels: `arrive`, `forward`, `sort`, `backward`, `step` (of data-parallel tables); of exchanges: `sizes`,
    `lengths`, `values`, `out`, `out_across`, `back`, `back_within`, `copies` (gradients of data-parallel tables) and
    `dense` (gradients of the dense part).
    `number` tells several of one role apart.
    """

    role: str
    kind: int
    group: int = -1
    number: int = 0

    @property
    def meeting(self) -> str:
        """Who meets, as `max_plus.Open` says; "" for kernels."""
        if self.role in _KERNELS:
            return ""
        if KINDS[self.kind] == "table_row_wise":
            return _NODE_MEETINGS.get(self.role, "world")
        return "world"


_KERNELS = ("arrive", "forward", "sort", "backward", "step")
PLAIN = ("arrive", "sort", "step")
"""Roles of open kernels that are themselves among the small ones."""
_NODE_MEETINGS = {"out": "within", "out_across": "across", "back": "across", "back_within": "within"}


def find_slots(
    names: Sequence[str],
    schedule: Schedule,
    lowered: LoweredProgram,
    groups: Sequence[tuple[int, int]],
    *,
    across: bool,
) -> dict[int, Slot]:
    """Which launches are open, by the order in which a sharded step makes them; `groups` are (kind, number), `across`
    says that there is more than one node."""
    sent = list(dict.fromkeys(kind for kind, _ in groups if KINDS[kind] != "data_parallel"))
    forward = iter([Slot("forward", kind, group) for kind, group in groups])
    last_first = sorted(groups, key=lambda each: -each[0])  # sections in reverse, their groups in order
    backward = iter([Slot("backward", kind, group) for kind, group in last_first])
    exchanges = iter(_exchange_slots(sent, tensors=_tensors(schedule, lowered, sent), across=across))
    launches = np.flatnonzero(schedule.code == Code.LAUNCH).tolist()
    updates = {int(schedule.op[at]) for at in launches if lowered.calls[schedule.call[at]].kind.startswith("tbe_back")}
    slots: dict[int, Slot] = {}
    reduced, arrived, copied, latest = 0, -1, -1, Slot("", 0)
    for at in launches:
        call, name = lowered.calls[schedule.call[at]], names[schedule.op[at]]
        if int(schedule.op[at]) in updates:
            updates.remove(int(schedule.op[at]))
            latest = next(backward)
            slots[at] = replace(latest, role="sort")
        elif call.family is COLLECTIVE and name == "c10d::allreduce_":
            copies = latest.role == "backward" and KINDS[latest.kind] == "data_parallel"
            slots[at] = Slot("copies" if copies else "dense", latest.kind if copies else 0, -1, reduced)
            reduced, copied = reduced + 1, latest.kind if copies else copied
        elif call.family is COLLECTIVE:
            slots[at] = next(exchanges)
            arrived = slots[at].kind if slots[at].role == "values" else arrived
        elif call.family is EMBEDDING:
            slots[at] = next(forward) if call.kind == "tbe_forward" else latest
        elif arrived >= 0 and name == "fbgemm::permute_2D_sparse_data":
            slots[at] = Slot("arrive", arrived)
            arrived = -1
        elif name == "aten::copy_" and copied >= 0:
            slots[at] = Slot("step", copied)
            copied = -1
    return slots


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
