"""Local search on the fast cost: starts by simple rules, changes worth trying to what is busiest, downhill, shake, and
again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from traincast.models.placement.plan import ShardingKind
from traincast.planner.sharding.assignment import (
    ALL,
    NODE,
    NOWHERE,
    RANKS,
    Assignment,
    Changes,
    Choices,
    StepCost,
    Weights,
    find_best_changes,
    rescore,
)
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

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


MOST_CANDIDATES = 1024
"""Changes of one kind that are tried at once; of more, a sample."""
_EVEN = 1e-9  # relative difference below which loads of ranks are equal: that of rounding
_LIGHT = 0.5  # of the average load of a rank: shards of tables that change their kind together


def find_busy_ranks(assignment: Assignment) -> IntArray:
    """Ranks that are the busiest of all in something: a stage of all groups together, or memory."""
    loads = np.concatenate([assignment.stages.sum(axis=1), assignment.memory], axis=1)
    uneven = loads.max(axis=0) > loads.min(axis=0) * (1.0 + _EVEN)
    return np.unique(np.argmax(loads[:, uneven], axis=0))


def _list_movable_shards(assignment: Assignment, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """(table, slot) of the shards on these ranks, or on their nodes, that could be elsewhere."""
    scope = assignment.choices.scope[assignment.option]
    nodes = np.unique(ranks // assignment.choices.gpus_per_node)
    on = np.isin(assignment.places, ranks) & (scope == RANKS)[:, None]
    on |= np.isin(assignment.places, nodes) & (scope == NODE)[:, None]
    table, slot = np.nonzero(on & (assignment.places != NOWHERE))
    return table, slot


def sample_changes(changes: Changes, random: np.random.Generator) -> Changes:
    """Some of many changes, each a candidate of its own."""
    if changes.count <= MOST_CANDIDATES:
        return changes
    rows = random.choice(changes.count, MOST_CANDIDATES, replace=False)
    return Changes.single(changes.table[rows], changes.option[rows], changes.places[rows])


def list_shifts(assignment: Assignment, ranks: IntArray) -> Changes:
    """Every shard on these ranks put on every other rank (or node)."""
    table, slot = _list_movable_shards(assignment, ranks)
    size = assignment.choices.world_size
    table, slot, target = np.repeat(table, size), np.repeat(slot, size), np.tile(np.arange(size), len(table))
    node = assignment.choices.scope[assignment.option[table]] == NODE
    other = (assignment.places[table, slot] != target) & (~node | (target < assignment.choices.nodes))
    table, slot, target = table[other], slot[other], target[other]
    places = assignment.places[table]
    places[np.arange(len(table)), slot] = target
    return Changes.single(table, assignment.option[table], places)


def list_swaps(assignment: Assignment, ranks: IntArray, random: np.random.Generator) -> Changes:
    """Shards on these ranks exchanged with shards on others; a sample where there are too many pairs."""
    first = np.stack(_list_movable_shards(assignment, ranks), axis=1)
    second = np.stack(_list_movable_shards(assignment, np.arange(assignment.choices.world_size)), axis=1)
    pairs = len(first) * len(second)
    chosen = np.arange(pairs) if pairs <= MOST_CANDIDATES else random.choice(pairs, MOST_CANDIDATES, replace=False)
    a, b = first[chosen // max(len(second), 1)], second[chosen % max(len(second), 1)]
    at_a, at_b = assignment.places[a[:, 0], a[:, 1]], assignment.places[b[:, 0], b[:, 1]]
    scope = assignment.choices.scope[assignment.option]
    real = (a[:, 0] != b[:, 0]) & (at_a != at_b) & (scope[a[:, 0]] == scope[b[:, 0]])
    a, b, at_a, at_b = a[real], b[real], at_a[real], at_b[real]
    count = len(a)
    to_b, to_a = assignment.places[a[:, 0]], assignment.places[b[:, 0]]
    to_b[np.arange(count), a[:, 1]] = at_b
    to_a[np.arange(count), b[:, 1]] = at_a
    table = np.concatenate([a[:, 0], b[:, 0]])
    places = np.concatenate([to_b, to_a])
    return Changes(np.tile(np.arange(count), 2), table, assignment.option[table], places, count)


def list_other_options(assignment: Assignment, tables: IntArray, load: FloatArray, groups: BoolArray) -> Changes:
    """These tables placed in other ways, by those `groups`: slices on the ranks with least `load`."""
    choices = assignment.choices
    emptiest = np.argsort(load, kind="stable")
    table_of, option_of, places_of = [], [], []
    for table in tables.tolist():
        for row in choices.rows[table]:
            if row == assignment.option[table] or not groups[choices.group[row]]:
                continue
            for places in _choose_places(assignment, row, emptiest):
                table_of.append(table)
                option_of.append(row)
                places_of.append(places)
    shape = (len(table_of), choices.most_slices)
    placed = np.array(places_of, dtype=np.int64).reshape(shape)
    return Changes.single(np.array(table_of, dtype=np.int64), np.array(option_of, dtype=np.int64), placed)


def _choose_places(assignment: Assignment, row: int, emptiest: IntArray) -> list[IntArray]:
    choices = assignment.choices
    option, size = choices.options[row], choices.world_size
    places = np.full(choices.most_slices, NOWHERE, dtype=np.int64)
    if not option.slices:
        return [places]
    if option.kind is ShardingKind.TABLE_ROW_WISE:
        return [np.where(np.arange(len(places)) == 0, node, NOWHERE) for node in range(assignment.choices.nodes)]
    if option.slices == 1:
        targets = emptiest[: min(size, 8)]
        return [np.where(np.arange(len(places)) == 0, rank, NOWHERE) for rank in targets.tolist()]
    places[: option.slices] = np.resize(emptiest, option.slices)
    return [places]


def list_emptied_groups(assignment: Assignment, groups: BoolArray) -> Changes:
    """All tables of one group placed by another one, the heaviest first on the least loaded rank or node: every group
    that is left costs launches and collectives of its own."""
    choices, weights = assignment.choices, assignment.cost.weights
    current = choices.group[assignment.option]
    parts: list[tuple[int, int, int, IntArray]] = []
    count = 0
    for group in np.unique(current).tolist():
        tables = np.flatnonzero(current == group)
        for other in np.flatnonzero(groups).tolist():
            rows = [find_option_in_group(choices, weights, table, other, _LIGHT) for table in tables.tolist()]
            if other == group or -1 in rows:
                continue
            option = assignment.option.copy()
            option[tables] = rows
            places = place_shards(choices, weights, option, fixed=(tables, assignment.places))
            parts += [(count, table, int(option[table]), places[table]) for table in tables.tolist()]
            count += 1
    columns = [np.array([part[i] for part in parts], dtype=np.int64) for i in range(3)]
    placed = np.array([part[3] for part in parts], dtype=np.int64).reshape(len(parts), choices.most_slices)
    return Changes(columns[0], columns[1], columns[2], placed, count)


_COARSE, _FINE = 3e-4, 2e-5  # relative gains below which a change is not worth making, at first and at last
_TOGETHER, _REFINED = 8, 2  # assignments that are improved side by side, at first and at last
_STEPS = 150  # of one descent at most, or eight times the tables of a rank
_SHAKEN = 4  # tables moved at random to leave a local optimum


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long to search: `rounds` of shakes after the descents from the starts, and never past `deadline` (of
    `time.monotonic`, seconds). Tables are placed as in starts that are at most `reach` times the best one."""

    rounds: int
    reach: float
    seed: int = 0
    deadline: float = float("inf")

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return monotonic() >= self.deadline


def search_locally(
    cost: StepCost, effort: Effort, progress: Callable[[float], None], others: Sequence[Assignment] = ()
) -> list[Assignment]:
    """Local optima, the best first, all different; at least one, however short the time. `others` are further
    assignments to begin with."""
    random = np.random.default_rng(effort.seed)
    begun = make_starts(cost, others)
    descent = _Descent(random, effort, _find_promising_groups(begun, effort.reach))
    first = find_best_by_groups(begun)
    others_begun = sorted((start for start in begun if start not in first), key=_get_score)
    optima = descent.run([*first, *others_begun][:_TOGETHER], _COARSE)
    for number in range(effort.rounds + 1):
        progress((number + 1) / (effort.rounds + 2))
        optima = drop_equal_assignments(optima)
        optima[:_REFINED] = descent.run(optima[:_REFINED], _FINE)
        if number == effort.rounds or effort.over:
            break
        best = min(optima, key=_get_score)
        shaken = [descent.shake_assignment(best) for _ in range(_REFINED)]
        rescore(shaken)
        optima = descent.run(shaken, _COARSE) + optima
    return drop_equal_assignments(optima)


def make_starts(cost: StepCost, others: Sequence[Assignment] = ()) -> list[Assignment]:
    """All starts and `others`, scored."""
    begun = [*(Assignment(cost, *start) for start in list_starts(cost.choices, cost.weights)), *others]
    rescore(begun)
    return begun


def list_used_groups(assignment: Assignment) -> BoolArray:
    """The groups that an assignment uses."""
    used = np.zeros(assignment.choices.groups, dtype=np.bool_)
    used[assignment.choices.group[assignment.option]] = True
    return used


def _find_promising_groups(begun: list[Assignment], reach: float) -> BoolArray:
    """Groups of the starts that are at most `reach` times the best one: each further group costs launches and waits."""
    best = min(start.score for start in begun)
    return np.asarray(np.any([list_used_groups(start) for start in begun if start.score <= reach * best], axis=0))


def find_best_by_groups(assignments: Sequence[Assignment]) -> list[Assignment]:
    """The best assignment of each set of groups, best first."""
    first: dict[bytes, Assignment] = {}
    for assignment in sorted(assignments, key=_get_score):
        first.setdefault(list_used_groups(assignment).tobytes(), assignment)
    return list(first.values())


@dataclass(frozen=True, eq=False, slots=True)
class _Descent:
    """Descents that place tables by some groups only."""

    random: np.random.Generator
    effort: Effort
    groups: BoolArray

    def run(self, assignments: list[Assignment], gain: float) -> list[Assignment]:
        """Makes the best change to the busiest ranks of each assignment, over and over, until none gains so much."""
        neighbourhoods = (self._list_changes, self._exchanged)
        tried = dict.fromkeys(range(len(assignments)), 0)
        for _ in range(max(_STEPS, 8 * len(assignments[0].option) // assignments[0].choices.world_size)):
            if not tried or self.effort.over:
                break
            changes = {number: neighbourhoods[which](assignments[number]) for number, which in tried.items()}
            best = find_best_changes(assignments, changes)
            for number in tried:
                gained = number in best and assignments[number].improve(*best[number], gain)
                tried[number] = 0 if gained else tried[number] + 1
            tried = {number: which for number, which in tried.items() if which < len(neighbourhoods)}
        rescore(assignments)
        return assignments

    def shake_assignment(self, best: Assignment) -> Assignment:
        """A copy with a few tables placed in another way, or elsewhere, at random."""
        option, places = best.option.copy(), best.places.copy()
        tables = self.random.choice(len(option), size=min(_SHAKEN, len(option)), replace=False)
        changes = list_other_options(best, tables, self.random.random(best.choices.world_size), self.groups)
        for table in tables.tolist():
            rows = np.flatnonzero(changes.table == table)
            if len(rows):
                row = rows[int(self.random.integers(len(rows)))]
                option[table], places[table] = changes.option[row], changes.places[row]
        return Assignment(best.cost, option, places)

    def _list_changes(self, assignment: Assignment) -> Changes:
        """Shards of busy ranks elsewhere, tables placed in another way, kinds given up."""
        busy = find_busy_ranks(assignment)
        moved = sample_changes(list_shifts(assignment, busy), self.random)
        return Changes.joined(
            [moved, self._list_replacements(assignment, busy), list_emptied_groups(assignment, self.groups)]
        )

    def _exchanged(self, assignment: Assignment) -> Changes:
        return list_swaps(assignment, find_busy_ranks(assignment), self.random)

    def _list_replacements(self, assignment: Assignment, ranks: IntArray) -> Changes:
        """Other options for tables of these ranks and for those that all ranks share."""
        slices = assignment.choices.slices[assignment.option]
        busy = np.isin(assignment.places, ranks).any(axis=1) | (slices == 0)
        load = assignment.stages[:, :, :2].sum(axis=(1, 2))
        return sample_changes(list_other_options(assignment, np.flatnonzero(busy), load, self.groups), self.random)


def drop_equal_assignments(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Assignments that differ, the best first."""
    kept: dict[bytes, Assignment] = {}
    for assignment in sorted(assignments, key=_get_score):
        kept.setdefault(assignment.option.tobytes() + assignment.places.tobytes(), assignment)
    return list(kept.values())


def _get_score(assignment: Assignment) -> float:
    return assignment.score
