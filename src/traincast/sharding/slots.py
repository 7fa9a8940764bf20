"""Durations of a sharded step that the plan decides."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.placement.plan import KINDS

KERNELS = ("order", "bucket", "arrive", "forward", "beside", "join", "sort", "backward", "step")
"""Roles of kernels."""
PLAIN = ("order", "bucket", "arrive", "beside", "join", "sort", "step")
"""Roles of open kernels that are themselves among the small ones."""
_HOST = ("views", "parts", "launches", "fills", "held")
_NODE_MEETINGS = {"out": "within", "out_across": "across", "back": "across", "back_within": "within"}


@dataclass(frozen=True, slots=True)
class Slot:
    """An open duration: `role` of a kind of sharding (number in `KINDS`), and which of its groups where it has several.

    Most roles are those that the writer of the step marks (`programs.sharded.marks.Role`). An update is three: `sort`,
    `backward`, and `copies` (the exchange of the gradients of data-parallel tables). Of host work there are: `views`
    and `parts` (of pooled rows and gradients, one per sender), `launches` (of the sort), `fills` (of the cache of
    tables in host memory). `held` is 1 on ranks that have tables of a group. `number` tells several of one role apart.
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
