"""Where HugeCTR's published planner puts tables: small ones on every GPU, the rest split and dealt out by lookups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDS = 20  # the planner's own limit of splits
_STATE_BYTES = 8.0  # of a weight and its Adagrad state
_CAPACITY_BYTES = 60e9  # of a GPU that tables may fill, the planner's default


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTables:
    """`copied` tables are on every GPU; `buckets[b]` are the tables of which bucket b (a GPU, or a node whose GPUs
    share its rows) has a part, one of `splits[table]` equal ones."""

    copied: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...]


def plan_tables(
    lookups: Sequence[int],
    table_bytes: Sequence[float],
    buckets: int,
    *,
    table_cost: float,
    copied_below: float,
    capacity: float,
) -> PlannedTables:
    """The plan with the least cost of its fullest bucket, in lookups; `table_cost` is that of sending one table's
    results, `copied_below` (bytes) the size of tables that every GPU has, `capacity` (bytes) what a bucket holds.

    Starts with whole tables, deals them out, and splits the busiest part in two, again and again. Splitting every table
    over all buckets is a plan too, and the one that remains where nothing else fits.
    """
    copied = tuple(t for t, size in enumerate(table_bytes) if size < copied_below)
    moved = [t for t in range(len(lookups)) if t not in copied]
    room = capacity - sum(table_bytes[t] for t in copied)
    splits = dict.fromkeys(moved, 1)
    best = (sum(lookups) / buckets + table_cost * len(lookups), [list(moved)] * buckets, dict.fromkeys(moved, buckets))
    for _ in range(_ROUNDS):
        held, stuck = _deal_out_parts(lookups, table_bytes, splits, buckets, table_cost, room)
        if stuck is None:
            cost = max(_compute_cost(lookups, splits, tables, table_cost) for tables in held)
            best = min(best, (cost, held, dict(splits)), key=lambda one: one[0])
        able = [t for t in splits if 2 * splits[t] <= buckets]
        if stuck is not None:
            able = [stuck] if stuck in able else []
        if not able:
            break
        splits[max(able, key=lambda t: lookups[t] / splits[t])] *= 2
    _, held, chosen = best
    return PlannedTables(
        copied=copied,
        buckets=tuple(tuple(sorted(tables)) for tables in held),
        splits=tuple(chosen.get(t, 0) for t in range(len(lookups))),
    )


def _compute_cost(lookups: Sequence[int], splits: dict[int, int], tables: Sequence[int], table_cost: float) -> float:
    return sum(lookups[t] / splits[t] for t in tables) + table_cost * len(tables)


def _deal_out_parts(
    lookups: Sequence[int],
    table_bytes: Sequence[float],
    splits: dict[int, int],
    buckets: int,
    table_cost: float,
    room: float,
) -> tuple[list[list[int]], int | None]:
    """The busiest part first to the bucket with the least cost that has room and no part of its table; the table that
    fits nowhere, if one does."""
    held: list[list[int]] = [[] for _ in range(buckets)]
    parts = [t for t in sorted(splits, key=lambda t: -lookups[t] / splits[t]) for _ in range(splits[t])]
    for t in parts:
        free = [
            bucket
            for bucket in held
            if t not in bucket and sum(table_bytes[s] / splits[s] for s in (*bucket, t)) <= room
        ]
        if not free:
            return held, t
        min(free, key=lambda bucket: _compute_cost(lookups, splits, bucket, table_cost)).append(t)
    return held, None


def count_adagrad_bytes(rows: Sequence[int], dim: int) -> list[float]:
    """Bytes of tables with their Adagrad state, as the planner counts them."""
    return [_STATE_BYTES * dim * count for count in rows]


def compute_capacity_bytes(gpus: int) -> float:
    """What the tables of this many GPUs may fill."""
    return _CAPACITY_BYTES * gpus
