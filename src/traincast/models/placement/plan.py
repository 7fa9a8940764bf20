"""Plans: how and on which ranks each table is sharded, in TorchRec's names; plans in files (JSON or YAML), one or
several by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from traincast.models.embeddings.table import Table
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value
from traincast.utils.files.reading import read_document


class ShardingKind(StrEnum):
    """How a table is cut and who has the parts, in the order in which a step goes through them."""

    TABLE_WISE = "table_wise"
    """Whole, on one rank."""
    ROW_WISE = "row_wise"
    """A block of rows on every rank."""
    COLUMN_WISE = "column_wise"
    """Equal slices of columns, each on a rank of its own choice."""
    TABLE_ROW_WISE = "table_row_wise"
    """A block of rows on every rank of one node."""
    DATA_PARALLEL = "data_parallel"
    """A copy on every rank, for that rank's samples."""

    @classmethod
    def _missing_(cls, value: object) -> ShardingKind:
        raise make_unknown_error("kind of sharding", str(value), list(cls), f"Choose {', '.join(cls)}.")

    @property
    def position(self) -> int:
        """Its number in the order of the kinds."""
        return _POSITIONS[self]

    @property
    def copied(self) -> bool:
        """Whether every rank has the whole table, for its own samples."""
        return self is ShardingKind.DATA_PARALLEL

    @property
    def by_rows(self) -> bool:
        """Whether ranks hold blocks of rows, and add up what they pooled."""
        return self in (ShardingKind.ROW_WISE, ShardingKind.TABLE_ROW_WISE)

    @property
    def everywhere(self) -> bool:
        """Whether every rank has a part of every such table."""
        return self in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL)

    def count_samples(self, batch_size: int, world_size: int) -> int:
        """The samples that a rank looks up, at `batch_size` samples per rank."""
        return batch_size if self.copied else batch_size * world_size

    def count_sharers(self, world_size: int, gpus_per_node: int) -> int:
        """How many ranks have equal parts of one table between them, or of a slice of its columns."""
        if self is ShardingKind.TABLE_ROW_WISE:
            return min(gpus_per_node, world_size)
        return world_size if self.everywhere else 1

    def count_row_blocks(self, world_size: int, gpus_per_node: int) -> int:
        """Into how many blocks of rows a table is cut."""
        return self.count_sharers(world_size, gpus_per_node) if self.by_rows else 1


_POSITIONS = {kind: position for position, kind in enumerate(ShardingKind)}


class ComputeKernel(StrEnum):
    """Where the weights of a table are, and who updates them."""

    FUSED = "fused"
    """In device memory, updated in the backward pass."""
    FUSED_UVM = "fused_uvm"
    """In host memory."""
    FUSED_UVM_CACHING = "fused_uvm_caching"
    """In host memory, with a cache on the device."""
    DENSE = "dense"
    """In device memory, updated by the optimizer of the dense part: that of copied tables."""

    @classmethod
    def _missing_(cls, value: object) -> ComputeKernel:
        raise make_unknown_error("kernel", str(value), list(cls), f"Choose {', '.join(cls)}.")

    @property
    def in_host_memory(self) -> bool:
        """Whether the weights are in host memory."""
        return self.host_access > 0

    @property
    def cached(self) -> bool:
        """Whether the device has a cache of weights that are in host memory."""
        return self is ComputeKernel.FUSED_UVM_CACHING

    @property
    def host_access(self) -> int:
        """What kernel calls say of host memory: 0 not used, 1 read over the link, 2 cached on the device."""
        return {ComputeKernel.FUSED_UVM: 1, ComputeKernel.FUSED_UVM_CACHING: 2}.get(self, 0)


COLUMN_STEP = 4
"""FBGEMM reads rows four elements at a time: a column slice is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one table lives.

    `ranks` depends on `kind`: `table_wise` one rank; `make_row_wise` all ranks in order, a block of rows each;
    `column_wise` a rank for each equal slice of columns (one rank may hold several); `table_row_wise` the ranks of one
    node in order, a block of rows each; `make_data_parallel` all ranks in order, a copy each.
    `kernel` says where the weights are; `cache_fraction` is the share of the rows that a cache on the device holds.
    Kind and kernel may be given by name.
    """

    kind: ShardingKind
    ranks: tuple[int, ...]
    kernel: ComputeKernel = ComputeKernel.FUSED
    cache_fraction: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ShardingKind(self.kind))
        object.__setattr__(self, "kernel", ComputeKernel(self.kernel))

    @staticmethod
    def make_data_parallel(world_size: int) -> Placement:
        """A copy on every rank."""
        return Placement(ShardingKind.DATA_PARALLEL, tuple(range(world_size)), ComputeKernel.DENSE)

    @staticmethod
    def make_row_wise(world_size: int) -> Placement:
        """A block of rows on every rank."""
        return Placement(ShardingKind.ROW_WISE, tuple(range(world_size)))


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of table number `table` on `rank`: rows and columns [first, one past the last). May be empty."""

    table: int
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def height(self) -> int:
        """How many rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """How many columns."""
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Plan:
    """A placement for each of `tables` (names) on `world_size` ranks."""

    tables: tuple[str, ...]
    placements: tuple[Placement, ...]
    world_size: int

    def get_placement(self, table: str) -> Placement:
        """The placement of the table of this name."""
        return self.placements[self.tables.index(table)]

    def make_shards(self, tables: Sequence[Table]) -> tuple[Shard, ...]:
        """All shards, table by table, as TorchRec cuts them: blocks of `ceil(rows / ranks)` rows, equal columns.

        A data-parallel table has one whole shard per rank; a block of rows past the end of the table is empty.
        """
        return tuple(
            shard
            for number, (table, placement) in enumerate(zip(tables, self.placements, strict=True))
            for shard in _cut_table(number, table, placement)
        )


def simplify_plan(plan: Plan) -> Plan:
    """The plan with tables whole that are cut by columns into one slice, where no table is cut into more: that is the
    same step. Alongside tables in several slices they stay, since one group of lookups serves both."""
    if any(placement.kind is ShardingKind.COLUMN_WISE and len(placement.ranks) > 1 for placement in plan.placements):
        return plan
    whole = [
        replace(placement, kind=ShardingKind.TABLE_WISE) if placement.kind is ShardingKind.COLUMN_WISE else placement
        for placement in plan.placements
    ]
    return replace(plan, placements=tuple(whole))


def _cut_table(number: int, table: Table, placement: Placement) -> Iterable[Shard]:
    ranks, columns = placement.ranks, (0, table.dim)
    if placement.kind.by_rows:
        block = -(-table.rows // len(ranks))
        for position, rank in enumerate(ranks):
            first, last = min(position * block, table.rows), min((position + 1) * block, table.rows)
            yield Shard(number, rank, (first, last), columns)
    elif placement.kind is ShardingKind.COLUMN_WISE:
        width = table.dim // len(ranks)
        for position, rank in enumerate(ranks):
            yield Shard(number, rank, (0, table.rows), (position * width, (position + 1) * width))
    else:
        for rank in ranks:
            yield Shard(number, rank, (0, table.rows), columns)


def check_plan(plan: Plan, tables: Sequence[Table], world_size: int, gpus_per_node: int) -> Plan:
    """The plan with its placements in the order of `tables`; one that is not for them is rejected by name."""
    if plan.world_size != world_size:
        raise TraincastError(f"the plan is for {plan.world_size} ranks, not {world_size}; give one for {world_size}")
    if len(plan.tables) != len(plan.placements):
        raise TraincastError(f"the plan has {len(plan.tables)} tables but {len(plan.placements)} placements")
    _check_names(plan.tables, [table.name for table in tables])
    placements = dict(zip(plan.tables, plan.placements, strict=True))
    for table in tables:
        check_placement(table, placements[table.name], world_size, gpus_per_node)
    return Plan(tuple(table.name for table in tables), tuple(placements[table.name] for table in tables), world_size)


def _check_names(planned: Sequence[str], wanted: Sequence[str]) -> None:
    name, times = Counter(planned).most_common(1)[0] if planned else ("", 0)
    if times > 1:
        raise TraincastError(f"the plan places table '{name}' {times} times; place each table once")
    known = set(planned)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise TraincastError(f"the plan does not place table '{missing[0]}'; it is for other tables")
    known = set(wanted)
    foreign = [name for name in planned if name not in known]
    if foreign:
        raise TraincastError(f"the plan places table '{foreign[0]}', which is not one of these; it is for other tables")


def check_placement(table: Table, placement: Placement, world_size: int, gpus_per_node: int) -> None:
    """Rejects a placement that cannot be, naming the table."""
    what = f"table '{table.name}': {placement.kind}"
    if (placement.kernel is ComputeKernel.DENSE) != placement.kind.copied:
        raise TraincastError(f"{what} with kernel '{placement.kernel}'; 'dense' is for data_parallel, and only that")
    if not (0.0 < placement.cache_fraction <= 1.0 if placement.kernel.cached else placement.cache_fraction == 0.0):
        raise TraincastError(
            f"{what} has cache_fraction {placement.cache_fraction:g}; give a share above 0 and up to 1 with "
            "fused_uvm_caching, else 0"
        )
    outside = [rank for rank in placement.ranks if not 0 <= rank < world_size]
    if outside:
        raise TraincastError(f"{what} on rank {outside[0]}; there are ranks 0 to {world_size - 1}")
    _check_ranks(what, table, placement, world_size, gpus_per_node)


def _check_ranks(what: str, table: Table, placement: Placement, world_size: int, gpus_per_node: int) -> None:
    ranks, count = placement.ranks, len(placement.ranks)
    if placement.kind is ShardingKind.TABLE_WISE and count != 1:
        raise TraincastError(f"{what} on {count} ranks; give one")
    if placement.kind.everywhere and ranks != tuple(range(world_size)):
        raise TraincastError(f"{what} must list all {world_size} ranks in order")
    if placement.kind is ShardingKind.TABLE_ROW_WISE:
        first = ranks[0] // gpus_per_node * gpus_per_node if ranks else 0
        node = tuple(range(first, min(first + gpus_per_node, world_size)))
        if ranks != node:
            raise TraincastError(f"{what} must list the ranks of one node in order, {gpus_per_node} GPUs a node")
    if placement.kind is ShardingKind.COLUMN_WISE:
        if not count:
            raise TraincastError(f"{what} on no rank; give a rank for each slice of columns")
        if table.dim % count or (count > 1 and table.dim // count % COLUMN_STEP):
            raise TraincastError(
                f"{what} in {count} slices of dim {table.dim}; it must divide into equal multiples of {COLUMN_STEP}"
            )


MAX_PLANS = 10_000
"""Each is simulated in full: a longer file is most likely a mistake."""
_PLAN_FIELDS = ("world_size", "tables")
_PLACEMENT_FIELDS = ("kind", "ranks", "kernel", "cache_fraction")


def convert_plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain data: `world_size`, and `tables` by name with kind, ranks, kernel (and cache_fraction)."""
    return {
        "world_size": plan.world_size,
        "tables": dict(zip(plan.tables, map(_format_placement, plan.placements), strict=True)),
    }


def _format_placement(placement: Placement) -> dict[str, Any]:
    entry = {"kind": placement.kind.value, "ranks": list(placement.ranks), "kernel": placement.kernel.value}
    return entry | ({"cache_fraction": placement.cache_fraction} if placement.cache_fraction else {})


def read_plan_from_json(content: Any, label: str = "the plan") -> Plan:
    """A plan from plain data; every complaint begins with `label`."""
    if not isinstance(content, Mapping) or set(content) != set(_PLAN_FIELDS):
        raise TraincastError(f"{label}: give 'world_size' and 'tables', and nothing else")
    size, tables = content["world_size"], content["tables"]
    if not (_is_integer(size) and size >= 1):
        raise TraincastError(f"{label}: world_size {shorten_value(size)}; give an integer number of ranks, 1 or more")
    if not isinstance(tables, Mapping) or not tables:
        raise TraincastError(f"{label}: 'tables' must map the name of each table to its placement")
    placements = tuple(_read_placement(entry, f"{label}, table '{name}'") for name, entry in tables.items())
    return Plan(tuple(str(name) for name in tables), placements, size)


def _read_placement(entry: Any, label: str) -> Placement:
    if not isinstance(entry, Mapping) or not {"kind", "ranks"} <= set(entry) <= set(_PLACEMENT_FIELDS):
        raise TraincastError(f"{label}: give kind and ranks, and optionally kernel and cache_fraction")
    ranks, share = entry["ranks"], entry.get("cache_fraction", 0.0)
    if not isinstance(ranks, list) or not all(_is_integer(rank) for rank in ranks):
        raise TraincastError(f"{label}: ranks {shorten_value(ranks)}; give a list of integers")
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TraincastError(f"{label}: cache_fraction {shorten_value(share)}; give a number")
    try:
        kind = ShardingKind(str(entry["kind"]))
        kernel = ComputeKernel(str(entry.get("kernel", "dense" if kind.copied else "fused")))
    except TraincastError as error:
        raise TraincastError(f"{label}: {error}") from None
    return Placement(kind, tuple(ranks), kernel, float(share))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def load_plans(path: Path) -> dict[str, Plan]:
    """The plans of a file by name: one plan, or `plans:` with a mapping of names to plans."""
    content = read_document(path)
    if not isinstance(content, Mapping) or set(content) != {"plans"}:
        return {path.stem: read_plan_from_json(content, str(path))}
    plans = content["plans"]
    if not isinstance(plans, Mapping) or not plans or len(plans) > MAX_PLANS:
        raise TraincastError(f"{path}: 'plans' must map names to plans, 1 to {MAX_PLANS} of them")
    return {str(name): read_plan_from_json(entry, f"{path}: plan '{name}'") for name, entry in plans.items()}
