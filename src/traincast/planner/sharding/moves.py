"""Changes worth trying: shards of busy ranks elsewhere or exchanged, and tables placed in another way."""

from __future__ import annotations

import numpy as np

from traincast.models.placement.kinds import ShardingKind
from traincast.planner.sharding.assignment import Assignment, Changes
from traincast.planner.sharding.choices import NODE, NOWHERE, RANKS
from traincast.planner.sharding.starts import find_option_in_group, place_shards
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

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
