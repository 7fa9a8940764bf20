"""The shardings that are compared for a task: those of the second paper, and two that cut tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from traincast.models.embeddings.table import Table
from traincast.models.placement.plan import COLUMN_STEP, Placement, Plan, ShardingKind

BALANCED = "greedy by lookups"
"""The plan of a task where no other is asked for: always among the candidates."""
GREEDY: dict[str, Callable[[Table], float]] = {
    BALANCED: lambda table: table.pooling.mean * table.dim,
    "greedy by size": lambda table: float(table.memory_bytes),
    "greedy by size x lookups": lambda table: float(table.memory_bytes) * table.pooling.mean,
}
"""What the greedy plans balance between ranks, each table whole."""
COPIED_BYTES = 256 << 10
"""Tables up to this size are copied to every rank in the plan that copies: their gradients are a message as large."""


def draw_candidate_plans(tables: Sequence[Table], ranks: int, *, seed: int) -> dict[str, Plan]:
    """Plans by name, those that are the same only once."""
    random = np.random.default_rng(seed)
    count = len(tables)
    holders = {
        **{name: _assign_greedily(tables, weight, ranks) for name, weight in GREEDY.items()},
        "naive": [number % ranks for number in range(count)],
        "chunked": [number * ranks // count for number in range(count)],
        "random": [int(rank) for rank in random.integers(ranks, size=count)],
    }
    plans = {name: [_place_whole_table(rank) for rank in chosen] for name, chosen in holders.items()}
    balanced = plans[BALANCED]
    heaviest = max(range(count), key=lambda number: GREEDY[BALANCED](tables[number]))
    plans["heaviest by rows"] = _replace_placements(balanced, {heaviest: Placement.make_row_wise(ranks)})
    if tables[heaviest].dim % (ranks * COLUMN_STEP) == 0:
        slices = Placement(ShardingKind.COLUMN_WISE, tuple(range(ranks)))
        plans["heaviest by columns"] = _replace_placements(balanced, {heaviest: slices})
    small = [number for number, table in enumerate(tables) if table.memory_bytes <= COPIED_BYTES]
    if 0 < len(small) < count:
        plans["small copied"] = _replace_placements(
            balanced, {number: Placement.make_data_parallel(ranks) for number in small}
        )
    names = tuple(table.name for table in tables)
    return _drop_equal_plans({name: Plan(names, tuple(chosen), ranks) for name, chosen in plans.items()})


def _place_whole_table(rank: int) -> Placement:
    return Placement(ShardingKind.TABLE_WISE, (rank,))


def _assign_greedily(tables: Sequence[Table], weight: Callable[[Table], float], ranks: int) -> list[int]:
    """The heaviest table first, each onto the rank with the least weight so far."""
    load, holder = [0.0] * ranks, [0] * len(tables)
    for number in sorted(range(len(tables)), key=lambda number: -weight(tables[number])):
        rank = min(range(ranks), key=load.__getitem__)
        holder[number] = rank
        load[rank] += weight(tables[number])
    return holder


def _replace_placements(placements: Sequence[Placement], others: dict[int, Placement]) -> list[Placement]:
    return [others.get(number, placement) for number, placement in enumerate(placements)]


def _drop_equal_plans(plans: dict[str, Plan]) -> dict[str, Plan]:
    kept: dict[tuple[Placement, ...], str] = {}
    for name, plan in plans.items():
        kept.setdefault(plan.placements, name)
    return {name: plans[name] for name in kept.values()}
