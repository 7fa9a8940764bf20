"""Where the search begins: options by simple rules, then the heaviest shard first onto the least loaded rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from traincast.models.placement.kinds import ShardingKind
from traincast.planner.sharding.choices import ALL, NODE, NOWHERE, Choices, Weights
from traincast.utils.arrays import IntArray

SPLITS = (np.inf, 1.0, 0.5, 0.25)
"""Weights of a shard, over the average load of a rank, above which its table is split."""
COPIES = (0.0, 1.0, 4.0, 16.0)
"""A table is copied to all ranks when a copy costs a rank no more than this many times its share of the table's
load."""

_SPLIT_KINDS = (
    (ShardingKind.COLUMN_WISE, ShardingKind.ROW_WISE),
    (ShardingKind.ROW_WISE,),
    (ShardingKind.TABLE_ROW_WISE, ShardingKind.ROW_WISE),
)  # in which heavy tables are split, the first that does


def list_starts(choices: Choices, weights: Weights) -> Iterator[tuple[IntArray, IntArray]]:
    """Options and places of every start, the plainest first: all tables alike, then by what they weigh."""
    seen = set()
    for group in range(choices.groups):
        for split in SPLITS:
            rows = [find_option_in_group(choices, weights, table, group, split) for table in range(len(choices.rows))]
            option = np.array(rows, dtype=np.int64)
            if -1 not in rows and option.tobytes() not in seen:
                seen.add(option.tobytes())
                yield option, place_shards(choices, weights, option)
    for copy in COPIES:
        for split in SPLITS:
            for kinds in _SPLIT_KINDS:
                option = _move_to_host_memory(choices, weights, _choose_options(choices, weights, split, copy, kinds))
                if option.tobytes() not in seen:
                    seen.add(option.tobytes())
                    yield option, place_shards(choices, weights, option)


def find_option_in_group(choices: Choices, weights: Weights, table: int, group: int, split: float) -> int:
    """The option of a table in a group: the first whose shards are light enough, else the lightest; -1 for none."""
    rows = [row for row in choices.rows[table] if choices.group[row] == group]
    light = [row for row in rows if weights.seconds[row] <= split * weights.average]
    return light[0] if light else min(rows, key=lambda row: float(weights.seconds[row]), default=-1)


def _choose_options(
    choices: Choices, weights: Weights, split: float, copy: float, kinds: tuple[ShardingKind, ...]
) -> IntArray:
    """For every table the first option light enough: whole, else split in the least number of shards."""
    whole = np.array([rows[0] for rows in choices.rows])
    average = weights.average
    chosen = whole.copy()
    for table, rows in enumerate(choices.rows):
        seconds, device = weights.seconds[rows[0]], weights.device_bytes[rows[0]]
        by_kind: dict[ShardingKind, list[int]] = {}
        for row in rows:
            if not choices.options[row].kernel.in_host_memory:
                by_kind.setdefault(choices.options[row].kind, []).append(row)
        copied = by_kind.get(ShardingKind.DATA_PARALLEL)
        if copied and weights.seconds[copied[0]] <= copy * seconds / choices.world_size:
            chosen[table] = copied[0]
        elif seconds > split * average or device > weights.capacity:
            parts = [row for kind in kinds for row in by_kind.get(kind, [])] or [rows[0]]
            fits = [row for row in parts if weights.device_bytes[row] <= weights.capacity] or parts[-1:]
            light = [row for row in fits if weights.seconds[row] <= split * average]
            chosen[table] = light[0] if light else min(fits, key=lambda row: float(weights.seconds[row]))
    return chosen


def _move_to_host_memory(choices: Choices, weights: Weights, option: IntArray) -> IntArray:
    """The options with tables moved to host memory, those that lose least per byte first, until the rest should fit."""
    option = option.copy()
    shards = choices.shards
    need = weights.device_bytes * shards
    excess = float(need[option].sum()) - 0.95 * choices.world_size * weights.capacity
    if excess <= 0:
        return option
    moves = []
    for table, rows in enumerate(choices.rows):
        kept = option[table]
        for row in rows:
            saved = need[kept] - need[row]
            if choices.options[row].kernel.in_host_memory and saved > 0:
                lost = weights.seconds[row] * shards[row] - weights.seconds[kept] * shards[kept]
                moves.append((max(float(lost), 0.0) / float(saved), table, row))
    for _, table, row in sorted(moves):
        if excess <= 0:
            break
        if not choices.options[option[table]].kernel.in_host_memory:
            excess -= float(need[option[table]] - need[row])
            option[table] = row
    return option


def place_shards(
    choices: Choices, weights: Weights, option: IntArray, *, fixed: tuple[IntArray, IntArray] | None = None
) -> IntArray:
    """Places for these options: the heaviest shard first, each on the least loaded rank that has room for it.

    `fixed` says which tables are to be placed, and where the others stay (None: all are placed).
    """
    places = np.full((len(option), choices.most_slices), NOWHERE, dtype=np.int64)
    wanted = np.ones(len(option), dtype=np.bool_)
    if fixed is not None:
        wanted[:] = False
        wanted[fixed[0]] = True
        places[~wanted] = fixed[1][~wanted]
    ranks = _Ranks(choices, weights)
    blocks: list[tuple[float, int, int]] = []
    for table, row in enumerate(option.tolist()):
        slices = int(choices.slices[row])
        if not slices or not wanted[table]:
            ranks.put(row, places[table, :slices].tolist())
        else:
            count = choices.gpus_per_node if choices.scope[row] == NODE else 1
            blocks += [(-count * float(weights.seconds[row]), table, slot) for slot in range(slices)]
    for _, table, slot in sorted(blocks):
        places[table, slot] = ranks.least(int(option[table]))
        ranks.put(int(option[table]), [int(places[table, slot])])
    return places


class _Ranks:
    """What ranks have so far: seconds, and bytes left on their devices."""

    def __init__(self, choices: Choices, weights: Weights) -> None:
        self.choices, self.weights = choices, weights
        self.load = np.zeros(choices.world_size)
        self.room = np.full(choices.world_size, weights.capacity)

    def put(self, row: int, places: list[int]) -> None:
        """Adds a shard of an option to each of these ranks (or to the ranks of this node, or to all)."""
        scope, per_node = self.choices.scope[row], self.choices.gpus_per_node
        members = [slice(None)] if scope == ALL else [
            slice(n * per_node, (n + 1) * per_node) if scope == NODE else slice(n, n + 1) for n in places
        ]  # fmt: skip
        for ranks in members:
            self.load[ranks] += self.weights.seconds[row]
            self.room[ranks] -= self.weights.device_bytes[row]

    def least(self, row: int) -> int:
        """The node with the least load, or the rank among those with room."""
        if self.choices.scope[row] == NODE:
            per_node = self.choices.gpus_per_node
            return int(np.argmin(np.add.reduceat(self.load, np.arange(0, len(self.load), per_node))))
        full = self.room < self.weights.device_bytes[row]
        return int(np.argmin(np.where(full, self.load + 1e6 * (1.0 + self.load.max()), self.load)))
