"""What each rank has of the tables under a plan, one kernel for all parts that can share it, and what the scopes of a
step are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import ceil

from traincast.ir.program import Program
from traincast.models.embeddings.table import (
    ITEM_BYTES,
    OPTIMIZER_STATE,
    Part,
    Table,
    count_fetched_rows,
    find_longest_bag,
    total_load,
)
from traincast.models.layers.builder import StepBuilder
from traincast.models.placement.plan import ComputeKernel, Plan, ShardingKind, check_plan
from traincast.utils.errors import TraincastError


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


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts of tables that one kernel looks up on one rank, for the samples it sees (all ranks' unless data-parallel).

    `kernel` and `optimizer` are as in plans and tables; `load` is in the order of `embeddings.load.FIELDS`;
    `count_fetched_rows` and `fetched_bytes` are what a batch brings into the device's cache of tables in host memory.
    """

    kernel: ComputeKernel
    dtype: str
    weighted: bool
    optimizer: str
    tables: int
    columns: int
    widest: int
    rows: int
    elements: int
    state_elements: int
    cached_elements: int
    lookups: int
    load: tuple[int, ...]
    longest_bag: int
    fetched_rows: int
    fetched_bytes: int


@dataclass(frozen=True)
class Section:
    """The tables of one kind of sharding: `ranks[r]` are the kernels of rank r."""

    kind: ShardingKind
    ranks: tuple[tuple[Batch, ...], ...]
    gpus_per_node: int

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Pooled columns of each rank's parts."""
        return tuple(sum(batch.columns for batch in batches) for batches in self.ranks)

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """Parts of each rank."""
        return tuple(sum(batch.tables for batch in batches) for batches in self.ranks)

    @cached_property
    def features(self) -> int:
        """Inputs that these tables have together; one for each slice of columns."""
        if self.kind is ShardingKind.ROW_WISE:
            return max(self.tables)
        if self.kind.copied:
            return self.tables[0]
        return sum(self.tables[:: self.gpus_per_node] if self.kind is ShardingKind.TABLE_ROW_WISE else self.tables)

    def count_local_lookups(self, rank: int) -> int:
        """Lookups that the samples of one rank make in the parts of `rank`; a copied table is every rank's own."""
        return self.lookups[rank] if self.kind.copied else round(self.lookups[rank] / len(self.ranks))

    @cached_property
    def own_lookups(self) -> int:
        """Lookups that the samples of one rank make in all these tables."""
        holders = 1 if self.kind.copied else len(self.ranks)
        return sum(self.count_local_lookups(rank) for rank in range(holders))

    @cached_property
    def lookups(self) -> tuple[int, ...]:
        """Lookups that each rank makes in a step."""
        return tuple(sum(batch.lookups for batch in batches) for batches in self.ranks)

    @cached_property
    def weighted(self) -> bool:
        """Whether lookups carry weights."""
        return any(batch.weighted for batches in self.ranks for batch in batches)


@dataclass(frozen=True)
class Layout:
    """All sections of a plan, in the order of `ShardingKind`, for `batch_size` samples per rank."""

    sections: tuple[Section, ...]
    world_size: int
    gpus_per_node: int
    batch_size: int

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.world_size // self.gpus_per_node)

    def make_program_key(self, rank: int) -> tuple[object, ...]:
        """Equal for ranks whose programs are equal."""
        node = rank // self.gpus_per_node if self.has_kind(ShardingKind.TABLE_ROW_WISE) else 0
        local = rank % self.gpus_per_node if self.has_kind(ShardingKind.TABLE_ROW_WISE) else 0
        return (node, local, *(section.ranks[rank] for section in self.sections))

    def make_structure_key(self, rank: int) -> tuple[object, ...]:
        """Equal for ranks that run the same ops, whatever their sizes."""
        return tuple(
            tuple((b.kernel, b.dtype, b.weighted, b.optimizer) for b in section.ranks[rank])
            for section in self.sections
        )

    def has_kind(self, kind: ShardingKind) -> bool:
        """Whether some table is sharded this way."""
        return any(section.kind is kind for section in self.sections)


def assign_shards_to_ranks(tables: Sequence[Table], plan: Plan, *, batch_size: int, gpus_per_node: int) -> Layout:
    """What each rank of the plan has, for a batch of `batch_size` samples per rank. A bad plan is rejected by name."""
    plan = check_plan(plan, tables, plan.world_size, gpus_per_node)
    if plan.world_size > gpus_per_node and plan.world_size % gpus_per_node:
        raise TraincastError(
            f"{plan.world_size} ranks do not fill nodes of {gpus_per_node} GPUs; give a multiple of {gpus_per_node}"
        )
    parts: dict[ShardingKind, dict[int, dict[tuple[ComputeKernel, str, bool, str], list[tuple[Part, int, float]]]]] = {}
    for shard in plan.make_shards(tables):
        table, placement = tables[shard.table], plan.placements[shard.table]
        part = Part(table, shard.width, shard.height / table.rows)
        form = (placement.kernel, table.dtype, table.weighted, table.optimizer)
        kinds = parts.setdefault(placement.kind, {})
        kinds.setdefault(shard.rank, {}).setdefault(form, []).append((part, shard.height, placement.cache_fraction))
    sections = []
    for kind in (kind for kind in ShardingKind if kind in parts):
        samples = kind.count_samples(batch_size, plan.world_size)
        ranks = []
        for rank in range(plan.world_size):
            held = parts[kind].get(rank, {})
            ranks.append(tuple(_make_batch(*form, held[form], samples) for form in sorted(held)))
        sections.append(Section(kind, tuple(ranks), gpus_per_node))
    return Layout(tuple(sections), plan.world_size, gpus_per_node, batch_size)


def _make_batch(
    kernel: ComputeKernel, dtype: str, weighted: bool, optimizer: str, held: list[tuple[Part, int, float]], samples: int
) -> Batch:
    parts = [part for part, _, _ in held]
    load = total_load(parts, samples)
    fetched = [count_fetched_rows(part, samples, fraction) if kernel.cached else 0.0 for part, _, fraction in held]
    elements = sum(height * part.columns for part, height, _ in held)
    rows, state = sum(height for _, height, _ in held), OPTIMIZER_STATE[optimizer]
    return Batch(
        kernel=kernel,
        dtype=dtype,
        weighted=weighted,
        optimizer=optimizer,
        tables=len(parts),
        columns=sum(part.columns for part in parts),
        widest=max(part.columns for part in parts),
        rows=rows,
        elements=elements,
        state_elements=state.per_weight * elements + state.per_row * rows,
        cached_elements=sum(ceil(fraction * height) * part.columns for part, height, fraction in held),
        lookups=round(sum(part.share * part.table.count_lookups(samples) for part in parts)),
        load=tuple(int(value) for value in load.round()),
        longest_bag=ceil(find_longest_bag(parts)),
        fetched_rows=round(sum(fetched)),
        fetched_bytes=round(
            sum(n * p.columns * ITEM_BYTES[p.table.dtype] for n, p in zip(fetched, parts, strict=True))
        ),
    )
