"""Durations of a sharded step that the plan decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from traincast.models.placement.kinds import ShardingKind
from traincast.models.sharded_dlrm.marks import ScopeRole


class Part(StrEnum):
    """What is open alongside the roles that the writer of the step marks: parts of an update, and work of the host."""

    SORT = "sort"
    """What comes before the kernel of an update."""
    BACKWARD = "backward"
    """The kernel of an update."""
    COPIES = "copies"
    """The collective of the gradients of copied tables."""
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
    {
        ScopeRole.SIZES,
        ScopeRole.LENGTHS,
        ScopeRole.VALUES,
        ScopeRole.OUT,
        ScopeRole.OUT_ACROSS,
        ScopeRole.BACK,
        ScopeRole.BACK_WITHIN,
        ScopeRole.DENSE,
    }
)
"""Roles of which the collective is open, not kernels."""
SMALL = frozenset(
    {ScopeRole.ORDER, ScopeRole.BUCKET, ScopeRole.ARRIVE, ScopeRole.BESIDE, ScopeRole.JOIN, Part.SORT, ScopeRole.STEP}
)
"""Open kernels that are themselves among the small ones around them."""
_NODE_MEETINGS: dict[ScopeRole | Part, str] = {
    ScopeRole.OUT: "within", ScopeRole.OUT_ACROSS: "across", ScopeRole.BACK: "across", ScopeRole.BACK_WITHIN: "within",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """An open duration: its role for a kind of sharding (None: for all), and for which of its groups where it has
    several (-1: for all); `number` tells several of one role apart."""

    role: ScopeRole | Part
    kind: ShardingKind | None = None
    group: int = -1
    number: int = 0

    @property
    def collective(self) -> str:
        """Who must have arrived before it starts ("" for kernels and host work: nobody else): all ranks ("world"),
        those of a node ("within"), one of each node ("across")."""
        if self.role not in EXCHANGES and self.role is not Part.COPIES:
            return ""
        if self.kind is ShardingKind.TABLE_ROW_WISE:
            return _NODE_MEETINGS.get(self.role, "world")
        return "world"
