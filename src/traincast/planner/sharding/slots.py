"""Durations of a sharded step that the plan decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from traincast.models.placement.kinds import ShardingKind
from traincast.models.sharded_dlrm.marks import Role


class Part(StrEnum):
    """What is open beside the roles that the writer of the step marks: parts of an update, and work of the host."""

    SORT = "sort"
    """What comes before the kernel of an update."""
    BACKWARD = "backward"
    """The kernel of an update."""
    COPIES = "copies"
    """The exchange of the gradients of copied tables."""
    VIEWS = "views"
    """Host: pooled rows as rows again, one per sender."""
    GRADIENTS = "gradients"
    """Host: gradients that are joined, one per sender."""
    LAUNCHES = "launches"
    """Host: the launches of the sort."""
    FILLS = "fills"
    """Host: the launches that fill the cache of tables in host memory."""
    HELD = "held"
    """No duration, but 1 on ranks that have tables of a group and 0 on the others."""


EXCHANGES = frozenset(
    {Role.SIZES, Role.LENGTHS, Role.VALUES, Role.OUT, Role.OUT_ACROSS, Role.BACK, Role.BACK_WITHIN, Role.DENSE}
)
"""Roles of which the exchange is open, not kernels."""
SMALL = frozenset({Role.ORDER, Role.BUCKET, Role.ARRIVE, Role.BESIDE, Role.JOIN, Part.SORT, Role.STEP})
"""Open kernels that are themselves among the small ones around them."""
_NODE_MEETINGS: dict[Role | Part, str] = {
    Role.OUT: "within", Role.OUT_ACROSS: "across", Role.BACK: "across", Role.BACK_WITHIN: "within",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """An open duration: its role for a kind of sharding (None: for all), and for which of its groups where it has
    several (-1: for all); `number` tells several of one role apart."""

    role: Role | Part
    kind: ShardingKind | None = None
    group: int = -1
    number: int = 0

    @property
    def meeting(self) -> str:
        """Who must have arrived before it starts ("" for kernels and host work: nobody else): all ranks ("world"),
        those of a node ("within"), one of each node ("across")."""
        if self.role not in EXCHANGES and self.role is not Part.COPIES:
            return ""
        if self.kind is ShardingKind.TABLE_ROW_WISE:
            return _NODE_MEETINGS.get(self.role, "world")
        return "world"
