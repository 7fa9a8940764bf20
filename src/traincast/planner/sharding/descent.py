"""Local search on the fast cost: change what is busiest until nothing helps, shake, and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from traincast.planner.sharding.assignment import Assignment, Changes, StepCost, find_best_changes, rescore
from traincast.planner.sharding.moves import (
    find_busy_ranks,
    list_emptied_groups,
    list_other_options,
    list_shifts,
    list_swaps,
    sample_changes,
)
from traincast.planner.sharding.starts import list_starts
from traincast.utils.arrays import BoolArray, IntArray

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
