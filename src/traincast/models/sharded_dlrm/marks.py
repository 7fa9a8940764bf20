"""What the scopes of a sharded step are there for: a column that the writer keeps alongside the program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from traincast.ir.program import Program
from traincast.models.layers.builder import StepBuilder
from traincast.models.placement.kinds import ShardingKind


class ScopeRole(StrEnum):
    """What part of the step a scope belongs to."""

    ORDER = "order"
    """All lookups of this rank's samples, ordered by where they go."""
    BUCKET = "bucket"
    """Row numbers sorted by the rank that holds their block of rows."""
    SIZES = "sizes"
    """The collective of how much will be sent."""
    LENGTHS = "lengths"
    """The collective of the lengths of bags."""
    VALUES = "values"
    """The collective of row numbers (number 0) and of weights (1)."""
    ARRIVE = "arrive"
    """What has arrived, ordered by table."""
    LOOKUP = "lookup"
    """One kernel's lookup, with what leads up to it."""
    BESIDE = "beside"
    """What several kernels pooled, side by side."""
    FLATTEN = "flatten"
    """Pooled rows as one line, to be sent."""
    OUT = "out"
    """Pooled rows on their way to the ranks of their samples; the first of two collectives for `table_row_wise`."""
    OUT_ACROSS = "out_across"
    """The second one, between nodes."""
    VIEW = "view"
    """What came from one sender, as rows."""
    JOIN = "join"
    """Gradients by where they go."""
    BACK = "back"
    """Gradients on their way back; the first of two collectives for `table_row_wise`."""
    BACK_WITHIN = "back_within"
    """The second one, within a node."""
    SHAPE = "shape"
    """Gradients that came back, as rows."""
    PART = "part"
    """Gradients of several kernels, apart."""
    UPDATE = "update"
    """One kernel's backward, with the collective of its gradient where tables are copies."""
    STEP = "step"
    """The optimizer of one kernel's copied tables."""
    DENSE = "dense"
    """The backward pass of the dense part, with the collectives of its gradients."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A role in the step of the tables of one `kind` of sharding: of one `batch` of theirs on this rank (-1: of all),
    and which of several alike (`number`). `kind` is None for what is no single kind's."""

    role: ScopeRole
    kind: ShardingKind | None = None
    batch: int = -1
    number: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class MarkedProgram:
    """A rank's program with the mark of each of its scopes (None: no plan decides how long it takes)."""

    program: Program
    marks: tuple[Mark | None, ...]

    @staticmethod
    def from_builder(builder: StepBuilder) -> MarkedProgram:
        """What was written, with the marks that its scopes were labelled with."""
        return MarkedProgram(
            builder.build_program(), tuple([label if isinstance(label, Mark) else None for label in builder.labels])
        )
