"""The search of small tasks: every set of kinds goes downhill by all changes of one table, the best then by changes of
two. Few tables leave no slack: what is best is often far from every start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement

import numpy as np

from traincast.models.placement.plan import ComputeKernel, ShardingKind
from traincast.planner.sharding.assignment import (
    NOWHERE,
    Assignment,
    Changes,
    Choices,
    StepCost,
    Weights,
    find_best_candidates,
    find_best_changes,
    rescore,
)
from traincast.planner.sharding.local_search import (
    Effort,
    drop_equal_assignments,
    find_best_by_groups,
    list_used_groups,
    make_starts,
    place_shards,
)
from traincast.utils.arrays import BoolArray, IntArray

_MOST_PLACES = 64  # of one option: more ways to deal out slices are thinned out
_MOST_CLASSES = 4  # ways to place tables of which every combination is begun with; of more, every pair
_STEPS = 40  # of a descent
_AT_ONCE = 4096  # candidates scored together
_DRAWN = 12  # starts at random
_PAIRED = 8  # assignments that changes of two tables are tried on
_PARTNERS = 128  # changes of one table, the least bad, that are tried together
_GAIN = 1e-6  # relative, below which a change is not worth making


def search_thoroughly(
    cost: StepCost, effort: Effort, progress: Callable[[float], None], others: Sequence[Assignment] = ()
) -> list[Assignment]:
    """Local optima, the best first, all different; at least one, however short the time. `others` are further
    assignments to begin with."""
    choices, weights = cost.choices, cost.weights
    begun = make_starts(cost, others)
    every = _Alternatives(choices)
    random = np.random.default_rng(effort.seed)
    classes = _group_by_placement(choices)
    going = [assignment.copy() for assignment in find_best_by_groups(begun)]
    for groups in _list_combinations(classes):
        option = _choose_lightest(choices, weights, groups)
        if option is not None and not effort.over:
            going.append(Assignment(cost, option, place_shards(choices, weights, option)))
    limits = [_list_class_groups(classes, list_used_groups(assignment)) for assignment in going]
    open_to_all = np.ones(choices.groups, dtype=np.bool_)
    going += [Assignment(cost, *every.drawn(random)) for _ in range(_DRAWN)]
    limits += [open_to_all] * _DRAWN
    rescore(going)
    _descend(going, limits, every, effort)
    progress(0.5)
    optima = _drop_equivalent([*going, *begun])
    for number, optimum in enumerate(optima[:_PAIRED]):
        while not effort.over and _try_pairs(optimum, every):
            _descend([optimum], [open_to_all], every, effort)
        progress(0.5 + 0.5 * (number + 1) / _PAIRED)
    rescore(optima)
    return _drop_equivalent(optima)


def _drop_equivalent(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Assignments that differ in more than the numbers of their ranks, the best first: ranks are alike, and where the
    options and the score are the same, so is the rest but for these."""
    kept: dict[tuple[bytes, float], Assignment] = {}
    for assignment in drop_equal_assignments(assignments):
        kept.setdefault((assignment.option.tobytes(), float(f"{assignment.score:.9g}")), assignment)
    return list(kept.values())


class _Alternatives:
    """Every way to place every table: `table`, `option` and `places` as in `Changes`."""

    def __init__(self, choices: Choices) -> None:
        rows = [
            (table, row, places)
            for table, options in enumerate(choices.rows)
            for row in options
            for places in _list_places(choices, row)
        ]
        self.table: IntArray = np.array([table for table, _, _ in rows], dtype=np.int64)
        self.option: IntArray = np.array([row for _, row, _ in rows], dtype=np.int64)
        self.places: IntArray = np.array([places for _, _, places in rows], dtype=np.int64)
        self.group = choices.group[self.option]

    def drawn(self, random: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Options and places of all tables, at random."""
        rows = [int(random.choice(np.flatnonzero(self.table == table))) for table in range(self.table.max() + 1)]
        return self.option[rows], self.places[rows]

    def list_others(self, assignment: Assignment, groups: BoolArray) -> IntArray:
        """Numbers of those that are not what the assignment has, by these groups only."""
        same = (assignment.option[self.table] == self.option) & np.all(
            np.sort(assignment.places[self.table], axis=1) == np.sort(self.places, axis=1), axis=1
        )
        return np.flatnonzero(~same & groups[self.group])

    def make_changes(self, first: IntArray, second: IntArray | None = None) -> Changes:
        """A candidate for each of these, or for each pair."""
        if second is None:
            return Changes.single(self.table[first], self.option[first], self.places[first])
        both = np.concatenate([first, second])
        return Changes(
            np.tile(np.arange(len(first)), 2), self.table[both], self.option[both], self.places[both], len(first)
        )


def _list_places(choices: Choices, row: int) -> Iterator[list[int]]:
    """Ranks (or nodes) for the shards of an option; slices of a table are alike, so their order does not matter."""
    option = choices.options[row]
    targets = range(option.count_targets(choices.world_size, choices.gpus_per_node))
    ways = list(combinations_with_replacement(targets, option.slices))
    for way in ways[:: -(-len(ways) // _MOST_PLACES)]:
        yield [*way, *[NOWHERE] * (choices.most_slices - option.slices)]


def _group_by_placement(choices: Choices) -> list[BoolArray]:
    """Groups by how they place tables: tables of other types or optimizers are placed alike."""
    kinds: dict[tuple[ShardingKind, ComputeKernel], BoolArray] = {}
    for row, option in enumerate(choices.options):
        groups = kinds.setdefault((option.kind, option.kernel), np.zeros(choices.groups, dtype=np.bool_))
        groups[choices.group[row]] = True
    return list(kinds.values())


def _list_combinations(classes: Sequence[BoolArray]) -> Iterator[BoolArray]:
    most = len(classes) if len(classes) <= _MOST_CLASSES else 2
    for count in range(1, most + 1):
        for some in combinations(classes, count):
            yield np.asarray(np.any(some, axis=0))


def _list_class_groups(classes: Sequence[BoolArray], used: BoolArray) -> BoolArray:
    """All groups of the classes of which some group is in use."""
    return np.asarray(np.any([groups for groups in classes if np.any(groups & used)], axis=0))


def _choose_lightest(choices: Choices, weights: Weights, groups: BoolArray) -> IntArray | None:
    """For every table the option that adds least to its ranks, all shards together, by these groups; None if a table
    has none."""
    total = np.where(groups[choices.group], weights.seconds * choices.shards, np.inf)
    option = np.array([rows[int(np.argmin(total[list(rows)]))] for rows in choices.rows], dtype=np.int64)
    return option if np.all(np.isfinite(total[option])) else None


def _descend(
    assignments: Sequence[Assignment], limits: Sequence[BoolArray], every: _Alternatives, effort: Effort
) -> None:
    """Makes the best change of one table in each assignment, by the groups it is limited to, until none gains."""
    going = list(range(len(assignments)))
    for _ in range(_STEPS):
        if not going or effort.over:
            break
        changes = {
            number: every.make_changes(every.list_others(assignments[number], limits[number])) for number in going
        }
        best = find_best_changes(assignments, changes)
        going = [number for number in best if assignments[number].improve(*best[number], _GAIN)]


def _try_pairs(assignment: Assignment, every: _Alternatives) -> bool:
    """Changes the places of two tables if that gains: of the least bad changes of one table, all pairs are tried."""
    single = every.list_others(assignment, np.ones(assignment.choices.groups, dtype=np.bool_))
    if not len(single):
        return False
    scores = find_best_candidates(assignment.cost, [assignment.pending(every.make_changes(single))])[0].scores
    chosen = single[np.argsort(scores, kind="stable")[:_PARTNERS]]
    first, second = np.triu_indices(len(chosen), 1)
    other = every.table[chosen[first]] != every.table[chosen[second]]
    first, second = chosen[first[other]], chosen[second[other]]
    for start in range(0, len(first), _AT_ONCE):
        one, two = first[start : start + _AT_ONCE], second[start : start + _AT_ONCE]
        best = find_best_candidates(assignment.cost, [assignment.pending(every.make_changes(one, two))])[0]
        at = slice(best.candidate, best.candidate + 1)
        if assignment.improve(every.make_changes(one[at], two[at]), best, _GAIN):
            return True
    return False
