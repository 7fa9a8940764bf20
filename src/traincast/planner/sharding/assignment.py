"""A plan as arrays: all options of all tables as rows, and the scores of thousands of changes at once.

Tables that one kernel looks up are a group; what a group takes on a rank is a function of sums over its shards there,
and a step is a function of all groups on all ranks. So a change costs as much as the groups and ranks it touches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from traincast.models.placement.options import Option
from traincast.models.placement.plan import Plan, ShardingKind
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

NOWHERE = -1
"""In arrays of places: no shard."""
RANKS, NODE, ALL = range(3)
"""Who has shards of an option: ranks of its own choice, the ranks of a node, all."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Choices:
    """All options of all tables as rows: `terms` and `memory` (device and host bytes) of one of their shards, and the
    `group` that looks them up. `rows[t]` are the rows of table t; `base` is the memory that every rank needs anyway."""

    options: tuple[Option, ...]
    table: IntArray
    group: IntArray
    rows: tuple[range, ...]
    terms: FloatArray
    memory: FloatArray
    base: FloatArray
    groups: int
    world_size: int
    gpus_per_node: int

    @cached_property
    def most_slices(self) -> int:
        """The largest number of shards that need a rank each."""
        return max(1, *(option.slices for option in self.options))

    @cached_property
    def slices(self) -> IntArray:
        """How many shards of each option need a rank each."""
        return np.array([option.slices for option in self.options])

    @cached_property
    def shards(self) -> FloatArray:
        """How many shards each option has."""
        return np.array([option.slices or self.world_size for option in self.options], dtype=np.float64)

    @cached_property
    def scope(self) -> IntArray:
        """Who has shards of each option."""
        return np.array([find_scope(option) for option in self.options])

    @property
    def nodes(self) -> int:
        """How many nodes the ranks are on."""
        return -(-self.world_size // self.gpus_per_node)


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """Seconds that one shard of each option adds to its rank, and bytes on the device; both per row of the choices.

    `capacity` is the bytes of a rank's device for shards, `average` the seconds of a rank when all tables are whole.
    """

    seconds: FloatArray
    device_bytes: FloatArray
    capacity: float
    average: float


def find_scope(option: Option) -> int:
    """Who has shards of an option."""
    return NODE if option.kind is ShardingKind.TABLE_ROW_WISE else RANKS if option.slices else ALL


_AT_ONCE = 1 << 17  # ranks times groups of candidates scored together: what fits the processor's cache


class StepCost(Protocol):
    """What a step costs, from sums over shards."""

    @property
    def choices(self) -> Choices:
        """All options of all tables."""

    @property
    def weights(self) -> Weights:
        """What one shard of each option adds to its rank, about."""

    def stages(self, sums: FloatArray, group: IntArray) -> FloatArray:
        """Sums [n, terms] of these groups -> [n, stages]: what a step needs to know of a group on a rank."""

    def objective(self, stages: FloatArray, memory: FloatArray) -> FloatArray:
        """[n, ranks, groups, stages] and bytes [n, ranks, 2] (device, host) -> seconds [n], more without room."""


@dataclass(frozen=True, eq=False, slots=True)
class Changes:
    """Changes to an assignment: number `candidate[i]` puts `table[i]` at row `option[i]` of the choices, on `places[i]`
    (ranks, or a node; `NOWHERE` fills up). A candidate may change several tables, each once; `count` is how many
    candidates there are."""

    candidate: IntArray
    table: IntArray
    option: IntArray
    places: IntArray
    count: int

    @staticmethod
    def single(table: IntArray, option: IntArray, places: IntArray) -> Changes:
        """One candidate per change."""
        return Changes(np.arange(len(table)), table, option, places, len(table))

    @staticmethod
    def joined(parts: Sequence[Changes]) -> Changes:
        """The candidates of all, one after the other."""
        begin = np.cumsum([0, *(part.count for part in parts)])
        return Changes(
            np.concatenate([part.candidate + start for part, start in zip(parts, begin.tolist(), strict=False)]),
            np.concatenate([part.table for part in parts]),
            np.concatenate([part.option for part in parts]),
            np.concatenate([part.places for part in parts]),
            int(begin[-1]),
        )

    def take(self, first: int, last: int) -> Changes:
        """The changes of candidates [first, last)."""
        rows = np.flatnonzero((self.candidate >= first) & (self.candidate < last))
        return Changes(
            self.candidate[rows] - first, self.table[rows], self.option[rows], self.places[rows], last - first
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Delta:
    """What changes add: `terms[i]` to place `key[i]` = (candidate * ranks + rank) * groups + group, and memory."""

    key: IntArray
    terms: FloatArray
    rank_key: IntArray
    rank_memory: FloatArray
    memory: FloatArray


@dataclass(frozen=True, eq=False, slots=True)
class Pending:
    """What changes make of the places they touch: new `sums` of `group` on `rank` for each `candidate` (of all ranks
    where `shared`), and of memory [candidates, ranks, 2]; `before` are the stages [ranks, groups, stages] so far."""

    sums: FloatArray
    candidate: IntArray
    rank: IntArray
    group: IntArray
    shared: BoolArray
    memory: FloatArray
    before: FloatArray

    def fill(self, stages: FloatArray, new: FloatArray) -> None:
        """Sets the stages of all candidates, given those of the places touched."""
        stages[:] = self.before
        stages[self.candidate, self.rank, self.group] = new
        shared = self.shared
        stages[self.candidate[shared], :, self.group[shared]] = new[shared][:, None]


@dataclass(frozen=True, eq=False, slots=True)
class Best:
    """The best of some candidates: its number, its score, and what it makes of the assignment; `scores` are all."""

    candidate: int
    score: float
    scores: FloatArray
    place: IntArray
    sums: FloatArray
    stages: FloatArray
    memory: FloatArray


def find_best_candidates(cost: StepCost, pending: Sequence[Pending]) -> list[Best]:
    """The best candidate of each assignment. Those of several are scored together: it costs hardly more."""
    new = cost.stages(np.concatenate([one.sums for one in pending]), np.concatenate([one.group for one in pending]))
    ends = np.cumsum([len(one.sums) for one in pending])[:-1]
    memory = np.concatenate([one.memory for one in pending])
    ranks, groups, count = pending[0].before.shape
    # a stage of a group is read for all ranks of all plans at once: so it is in memory, whatever the order of axes
    together = np.empty((count, groups, len(memory), ranks)).transpose(2, 3, 1, 0)
    candidates = np.cumsum([len(one.memory) for one in pending])[:-1]
    stages = np.split(together, candidates)
    for one, filled, values in zip(pending, stages, np.split(new, ends), strict=True):
        one.fill(filled, values)
    objective = cost.objective(together, memory)
    bests = []
    for one, filled, scores in zip(pending, stages, np.split(objective, candidates), strict=True):
        best = int(np.argmin(scores))
        rows = np.flatnonzero(one.candidate == best)
        place = one.rank[rows] * one.before.shape[1] + one.group[rows]
        bests.append(Best(best, float(scores[best]), scores, place, one.sums[rows], filled[best], one.memory[best]))
    return bests


def find_best_changes(
    assignments: Sequence[Assignment], changes: Mapping[int, Changes]
) -> dict[int, tuple[Changes, Best]]:
    """The best of the changes to each assignment (by its number), as many scored at once as is fast."""
    choices, cost = assignments[0].choices, assignments[0].cost
    at_once = max(1, _AT_ONCE // (choices.world_size * choices.groups))
    parts = [
        (number, many.take(first, min(first + at_once, many.count)))
        for number, many in changes.items()
        for first in range(0, many.count, at_once)
    ]
    bests: dict[int, tuple[Changes, Best]] = {}
    while parts:
        some = [parts.pop(0)]
        while parts and sum(part.count for _, part in some) + parts[0][1].count <= at_once:
            some.append(parts.pop(0))
        scored = find_best_candidates(cost, [assignments[number].pending(part) for number, part in some])
        for (number, part), best in zip(some, scored, strict=True):
            if number not in bests or best.score < bests[number][1].score:
                bests[number] = part.take(best.candidate, best.candidate + 1), best
    return bests


def rescore(assignments: Sequence[Assignment]) -> None:
    """Sums assignments anew, without the rounding of many changes, and sets their scores."""
    for assignment in assignments:
        assignment.refresh()
    _compute_stages(assignments)
    cost = assignments[0].cost
    objective = cost.objective(
        np.stack([one.stages for one in assignments]), np.stack([one.memory for one in assignments])
    )
    for assignment, score in zip(assignments, objective.tolist(), strict=True):
        assignment.scored(score)


def _compute_stages(assignments: Sequence[Assignment]) -> None:
    """Sets the stages of assignments from their sums."""
    choices, cost = assignments[0].choices, assignments[0].cost
    ranks, groups = choices.world_size, choices.groups
    group = np.tile(np.arange(groups), ranks * len(assignments))
    stages = cost.stages(np.concatenate([one.sums for one in assignments]), group)
    for assignment, values in zip(assignments, stages.reshape(len(assignments), ranks, groups, -1), strict=True):
        assignment.set_stages(values)


class Assignment:
    """Which option every table has, and where; with the sums that score it."""

    def __init__(self, cost: StepCost, option: IntArray, places: IntArray) -> None:
        self.cost, self.choices = cost, cost.choices
        self.option, self.places = option.copy(), places.copy()
        self._score: float | None = None
        self._stages: FloatArray | None = None
        choices = self.choices
        self._scope = choices.scope
        self._shared = np.zeros(choices.groups, dtype=np.bool_)
        self._shared[choices.group[self._scope == ALL]] = True
        ranks = np.arange(choices.world_size)
        self._node_ranks = [ranks[ranks // choices.gpus_per_node == n] for n in range(choices.nodes)]
        self.refresh()

    @property
    def score(self) -> float:
        """The objective; seconds of a step where memory suffices."""
        if self._score is None:
            self._score = float(self.cost.objective(self.stages[None], self.memory[None])[0])
        return self._score

    @property
    def stages(self) -> FloatArray:
        """Stages of all groups on all ranks: [ranks, groups, stages]."""
        if self._stages is None:
            _compute_stages([self])
        assert self._stages is not None
        return self._stages

    def set_stages(self, stages: FloatArray) -> None:
        """Takes the stages from whoever has worked them out from the sums."""
        self._stages = stages.copy()
        self._stages[:, self._shared] = self._stages[:1, self._shared]

    def scored(self, score: float) -> None:
        """Takes the objective from whoever has worked it out."""
        self._score = score

    def refresh(self) -> None:
        """Sums everything anew, without the rounding of many changes."""
        ranks, groups = self.choices.world_size, self.choices.groups
        tables = np.arange(len(self.option))
        delta = self._compute_delta(np.zeros_like(tables), tables, self.option, self.places, 1)
        self.sums = np.zeros((ranks * groups, self.choices.terms.shape[1]))
        np.add.at(self.sums, delta.key, delta.terms)
        self.memory = self.choices.base + np.tile(delta.memory[0], (ranks, 1))
        np.add.at(self.memory, delta.rank_key, delta.rank_memory)
        self._stages = None

    def pending(self, changes: Changes) -> Pending:
        """What the candidates would change."""
        ranks, groups = self.choices.world_size, self.choices.groups
        delta = self._sum_differences(changes)
        touched, place = np.unique(delta.key, return_inverse=True)
        summed = np.zeros((len(touched), delta.terms.shape[1]))
        np.add.at(summed, place, delta.terms)
        candidate, where = np.divmod(touched, ranks * groups)
        rank, group = np.divmod(where, groups)
        memory = self.memory + delta.memory[:, None]
        np.add.at(memory.reshape(-1, memory.shape[-1]), delta.rank_key, delta.rank_memory)
        shared = self._shared[group]
        return Pending(self.sums[where] + summed, candidate, rank, group, shared, memory, self.stages)

    def apply(self, changes: Changes, best: Best) -> None:
        """Makes the changes of one candidate, the best of some."""
        self.sums[best.place] = best.sums
        self._stages, self.memory, self._score = best.stages.copy(), best.memory.copy(), best.score
        self.option[changes.table] = changes.option
        self.places[changes.table] = changes.places

    def improve(self, changes: Changes, best: Best, gain: float) -> bool:
        """Makes the changes of one candidate if its score is lower by more than this share; says whether it was."""
        if not best.score < self.score * (1.0 - gain):
            return False
        self.apply(changes, best)
        return True

    def _sum_differences(self, changes: Changes) -> _Delta:
        where, table = changes.candidate, changes.table
        new = self._compute_delta(where, table, changes.option, changes.places, changes.count)
        old = self._compute_delta(where, table, self.option[table], self.places[table], changes.count)
        return _Delta(
            np.concatenate([new.key, old.key]),
            np.concatenate([new.terms, -old.terms]),
            np.concatenate([new.rank_key, old.rank_key]),
            np.concatenate([new.rank_memory, -old.rank_memory]),
            new.memory - old.memory,
        )

    def _compute_delta(
        self, candidate: IntArray, table: IntArray, option: IntArray, places: IntArray, count: int
    ) -> _Delta:
        choices, ranks = self.choices, self.choices.world_size
        scope = self._scope[option]
        row, slot = np.nonzero((places != NOWHERE) & (scope == RANKS)[:, None])
        at, rows = [candidate[row] * ranks + places[row, slot]], [option[row]]
        for position in np.flatnonzero(scope == NODE).tolist():
            members = self._node_ranks[places[position, 0]]
            at.append(candidate[position] * ranks + members)
            rows.append(np.full(len(members), option[position]))
        rank_key, rank_rows = np.concatenate(at), np.concatenate(rows)
        everywhere = scope == ALL  # equal on all ranks: the sums of the first stand for them
        memory = np.zeros((count, choices.memory.shape[1]))
        np.add.at(memory, candidate[everywhere], choices.memory[option[everywhere]])
        all_rows = np.concatenate([rank_rows, option[everywhere]])
        key = np.concatenate([rank_key, candidate[everywhere] * ranks]) * choices.groups + choices.group[all_rows]
        return _Delta(key, choices.terms[all_rows], rank_key, choices.memory[rank_rows], memory)

    def plan(self, names: Sequence[str]) -> Plan:
        """The plan for tables of these names."""
        choices, placements = self.choices, []
        for row, places in zip(self.option.tolist(), self.places.tolist(), strict=True):
            option = choices.options[row]
            placements.append(option.make_placement(places[: option.slices], choices.world_size, choices.gpus_per_node))
        return Plan(tuple(names), tuple(placements), choices.world_size)

    def copy(self) -> Assignment:
        """The same assignment, to be changed on its own."""
        return Assignment(self.cost, self.option, self.places)
