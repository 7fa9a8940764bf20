"""The ways in which a table can be placed that are worth trying, and greedy plans to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.models.embeddings.table import Table
from traincast.models.placement.memory import MemoryLimits, compute_common_bytes, compute_shard_bytes
from traincast.models.placement.plan import COLUMN_STEP, ComputeKernel, Placement, Plan, Shard, ShardingKind

MIN_COLUMNS = 32
"""Columns of a slice at least: FBGEMM gives a bag eight threads of four columns however few there are."""
CACHE_FRACTIONS = (0.1, 0.3)
"""Shares of the rows that a cache holds: half and one and a half times what FBGEMM takes when not told (0.2)."""
_TIGHT = 0.7  # share of all device memory from which tables may have to live in host memory
_COPIED = 0.05  # share of a device's memory up to which a table may be copied to every rank


@dataclass(frozen=True, slots=True)
class Option:
    """A way to place a table, ranks left open. `slices` is the number of shards that need a rank each: of columns for
    `column_wise`, one for `table_wise` and, a node instead of a rank, for `table_row_wise`; 0 when all ranks take part.
    """

    kind: ShardingKind
    slices: int
    kernel: ComputeKernel = ComputeKernel.FUSED
    cache_fraction: float = 0.0

    def count_targets(self, world_size: int, gpus_per_node: int) -> int:
        """How many ranks a shard can choose from; for `table_row_wise`: nodes."""
        return -(-world_size // gpus_per_node) if self.kind is ShardingKind.TABLE_ROW_WISE else world_size

    def shard_shape(self, table: Table, world_size: int, gpus_per_node: int) -> tuple[int, int]:
        """Rows and columns of the first shard; the last block of rows may be lower."""
        rows = -(-table.rows // self.kind.count_row_blocks(world_size, gpus_per_node))
        return rows, table.dim // self.slices if self.kind is ShardingKind.COLUMN_WISE else table.dim

    def make_placement(self, places: Sequence[int], world_size: int, gpus_per_node: int) -> Placement:
        """The placement on these ranks (for `table_row_wise`: this node)."""
        if self.kind is ShardingKind.TABLE_ROW_WISE:
            first = places[0] * gpus_per_node
            ranks: Sequence[int] = range(first, min(first + gpus_per_node, world_size))
        else:
            ranks = places if self.slices else range(world_size)
        return Placement(self.kind, tuple(ranks), self.kernel, self.cache_fraction)


def find_option(placement: Placement) -> Option:
    """The option that a placement is one case of."""
    slices = 0 if placement.kind.everywhere else 1
    if placement.kind is ShardingKind.COLUMN_WISE:
        slices = len(placement.ranks)
    return Option(placement.kind, slices, placement.kernel, placement.cache_fraction)


def list_table_options(
    tables: Sequence[Table], limits: MemoryLimits, world_size: int, gpus_per_node: int
) -> list[tuple[Option, ...]]:
    """For every table the options worth trying, whole on one rank first. Host memory is for when devices are full."""
    tight = sum(table.memory_bytes for table in tables) > _TIGHT * world_size * limits.for_tables
    return [_list_options(table, limits, world_size, gpus_per_node, tight) for table in tables]


def _list_options(
    table: Table, limits: MemoryLimits, world_size: int, gpus_per_node: int, tight: bool
) -> tuple[Option, ...]:
    options = [Option(ShardingKind.TABLE_WISE, 1)]
    if world_size > 1:
        options += [Option(ShardingKind.COLUMN_WISE, count) for count in _list_slice_counts(table.dim, world_size)]
        options.append(Option(ShardingKind.ROW_WISE, 0))
        if 1 < gpus_per_node < world_size:
            options.append(Option(ShardingKind.TABLE_ROW_WISE, 1))
    if table.memory_bytes < _COPIED * limits.for_tables:  # on one rank too: its lookup exchanges nothing
        options.append(Option(ShardingKind.DATA_PARALLEL, 0, ComputeKernel.DENSE))
    if tight:
        wide = (ShardingKind.TABLE_WISE, ShardingKind.ROW_WISE)
        for kind, slices in [(option.kind, option.slices) for option in options if option.kind in wide]:
            options += [Option(kind, slices, ComputeKernel.FUSED_UVM_CACHING, share) for share in CACHE_FRACTIONS]
            options.append(Option(kind, slices, ComputeKernel.FUSED_UVM))
    return tuple(options)


def _list_slice_counts(dim: int, world_size: int) -> list[int]:
    """Numbers of equal slices: powers of two up to one per rank. One slice is a whole table that travels with the
    slices of others."""
    counts = [2**power for power in range(1, 17) if 2**power <= world_size]
    return [1, *(n for n in counts if dim % n == 0 and dim // n >= MIN_COLUMNS and dim // n % COLUMN_STEP == 0)]


WEIGHTS: dict[str, Callable[[Table], float]] = {
    "greedy by size": lambda table: float(table.memory_bytes),
    "greedy by lookups": lambda table: table.pooling.mean * table.dim,
    "greedy by rows": lambda table: float(table.rows),
}
"""What each baseline balances between ranks."""


def make_greedy_plan(
    tables: Sequence[Table], weight: Callable[[Table], float], limits: MemoryLimits, world_size: int, *, batch_size: int
) -> Plan:
    """Tables whole on one rank, the heaviest first, each on the rank with the least weight that has room for it.

    A table for which no rank has room is split by rows over all of them.
    """
    common = compute_common_bytes(tables, batch_size=batch_size)
    load, room = np.zeros(world_size), np.full(world_size, limits.for_tables - common)
    placements: dict[str, Placement] = {}
    by_rows = Placement.make_row_wise(world_size)

    def device_bytes(table: Table, placement: Placement, rows: int) -> float:
        shard = Shard(0, 0, (0, rows), (0, table.dim))
        return compute_shard_bytes(table, placement, shard, batch_size=batch_size, world_size=world_size)[0]

    for table in sorted(tables, key=lambda one: (-weight(one), *_make_sort_key(one), one.name)):
        need = device_bytes(table, Placement(ShardingKind.TABLE_WISE, (0,)), table.rows)
        able = np.flatnonzero(room >= need)
        if len(able) or world_size == 1:
            rank = int(able[np.argmin(load[able])]) if len(able) else 0
            placements[table.name] = Placement(ShardingKind.TABLE_WISE, (rank,))
            load[rank] += weight(table)
            room[rank] -= need
        else:
            placements[table.name] = by_rows
            load += weight(table) / world_size
            room -= device_bytes(table, by_rows, -(-table.rows // world_size))
    names = tuple(table.name for table in tables)
    return Plan(names, tuple(placements[name] for name in names), world_size)


def _make_sort_key(table: Table) -> tuple[float, float, float, str]:
    """What tables of one weight are ordered by, the largest first: not by the order in which they were given."""
    return -table.memory_bytes, -table.rows, -table.pooling.mean, repr((table.access, table.dtype, table.weighted))


def make_greedy_plans(
    tables: Sequence[Table], limits: MemoryLimits, world_size: int, *, batch_size: int
) -> dict[str, Plan]:
    """All baselines by name."""
    return {
        name: make_greedy_plan(tables, weight, limits, world_size, batch_size=batch_size)
        for name, weight in WEIGHTS.items()
    }
