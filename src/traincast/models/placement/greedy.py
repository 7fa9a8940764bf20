"""Greedy plans to compare with: every table whole, the largest first, onto the rank with the least so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from traincast.models.embeddings.table import Table
from traincast.models.placement.kinds import ShardingKind
from traincast.models.placement.memory import MemoryLimits, compute_common_bytes, compute_shard_bytes
from traincast.models.placement.plan import Placement, Plan, Shard

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
