"""Plans as arrays, and many changes to them at once."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.models.placement import Placement, Plan, ShardingKind
from traincast.planner.sharding import assignment as assigning
from traincast.planner.sharding.assignment import (
    ALL,
    NODE,
    NOWHERE,
    RANKS,
    Assignment,
    Changes,
    find_best_candidates,
    find_best_changes,
    find_scope,
    rescore,
)
from traincast.planner.sharding.local_search import list_shifts


def _whole(cost, ranks):
    names = tuple(table.name for table in cost.task.tables)
    return cost.assignment(Plan(names, tuple(Placement("table_wise", (rank,)) for rank in ranks), cost.task.gpus))


def test_choices_say_who_has_shards(two_nodes_cost):
    choices = two_nodes_cost.choices
    expected = {
        ShardingKind.TABLE_WISE: RANKS,
        ShardingKind.COLUMN_WISE: RANKS,
        ShardingKind.TABLE_ROW_WISE: NODE,
        ShardingKind.ROW_WISE: ALL,
        ShardingKind.DATA_PARALLEL: ALL,
    }
    assert {option.kind: find_scope(option) for option in choices.options} == expected
    assert choices.scope.tolist() == [expected[option.kind] for option in choices.options]
    assert choices.nodes == 2


def test_choices_count_shards(two_nodes_cost):
    choices = two_nodes_cost.choices
    for option, slices, shards in zip(choices.options, choices.slices, choices.shards, strict=True):
        assert slices == option.slices
        assert shards == (option.slices or 16)
    assert choices.most_slices == max(option.slices for option in choices.options)


def test_rows_of_a_table_are_its_options_whole_first(node_cost):
    choices = node_cost.choices
    for number, rows in enumerate(choices.rows):
        assert choices.options[rows[0]].kind is ShardingKind.TABLE_WISE
        assert (choices.table[list(rows)] == number).all()
    assert sum(len(rows) for rows in choices.rows) == len(choices.options)


def test_an_assignment_is_a_plan_and_back(node_cost):
    names = tuple(table.name for table in node_cost.task.tables)
    plan = Plan(
        names,
        (
            Placement("table_wise", (3,)),
            Placement.make_row_wise(4),
            Placement("column_wise", (2, 0)),
            Placement.make_data_parallel(4),
        ),
        4,
    )
    placed = node_cost.assignment(plan)
    assert placed.plan(names) == plan
    assert placed.places[2, :2].tolist() == [2, 0]
    assert placed.places[1].tolist() == [NOWHERE] * node_cost.choices.most_slices


def test_a_node_is_a_place_of_tables_by_rows(two_nodes_cost):
    names = tuple(table.name for table in two_nodes_cost.task.tables)
    second = Placement("table_row_wise", tuple(range(8, 16)))
    plan = Plan(names, (second, Placement("table_wise", (5,)), second), 16)
    placed = two_nodes_cost.assignment(plan)
    assert placed.places[:, 0].tolist() == [1, 5, 1]
    assert placed.plan(names) == plan
    held = placed.stages[:, :, 2].sum(axis=1)  # shards
    assert held.tolist() == [0, 0, 0, 0, 0, 1, 0, 0] + [2] * 8


def test_memory_is_what_shards_take_and_every_rank_needs(node_cost):
    placed, choices = _whole(node_cost, (0, 0, 1, 3)), node_cost.choices
    whole = [rows[0] for rows in choices.rows]
    taken = choices.memory[whole, 0]
    expected = choices.base[0] + np.array([taken[0] + taken[1], taken[2], 0.0, taken[3]])
    assert placed.memory[:, 0] == pytest.approx(expected)


def test_the_score_is_the_objective(node_cost):
    placed = _whole(node_cost, (0, 1, 2, 3))
    assert placed.score == float(node_cost.objective(placed.stages[None], placed.memory[None])[0])
    again = placed.copy()
    rescore([again])
    assert again.score == pytest.approx(placed.score, rel=1e-12)


def test_a_copy_is_changed_on_its_own(node_cost):
    placed = _whole(node_cost, (0, 1, 2, 3))
    other = placed.copy()
    other.places[0, 0] = 3
    assert placed.places[0, 0] == 0


def _changes(count, tables):
    numbers = np.arange(count * tables)
    return Changes(numbers // tables, numbers % tables, numbers + 100, numbers[:, None], count)


def test_some_of_many_changes():
    some = _changes(5, 2).take(1, 3)
    assert some.count == 2
    assert some.candidate.tolist() == [0, 0, 1, 1]
    assert some.option.tolist() == [102, 103, 104, 105]


def test_changes_one_after_the_other():
    both = Changes.joined([_changes(2, 2), _changes(3, 1)])
    assert both.count == 5
    assert both.candidate.tolist() == [0, 0, 1, 1, 2, 3, 4]
    assert both.table.tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert both.option.tolist() == [100, 101, 102, 103, 100, 101, 102]


def test_a_change_of_one_table_each():
    single = Changes.single(np.array([3, 1]), np.array([7, 8]), np.array([[0], [2]]))
    assert (single.count, single.candidate.tolist()) == (2, [0, 1])


def test_the_best_of_many_is_the_same_however_few_are_scored_at_once(node_cost, monkeypatch):
    placed = [_whole(node_cost, (0, 0, 0, 0)), _whole(node_cost, (1, 1, 2, 2))]
    moved = {number: list_shifts(each, np.arange(4)) for number, each in enumerate(placed)}
    together = find_best_changes(placed, moved)
    monkeypatch.setattr(assigning, "_AT_ONCE", 3 * 4 * node_cost.choices.groups)  # three candidates
    by_threes = find_best_changes(placed, moved)
    for number, (change, best) in together.items():
        assert by_threes[number][1].score == pytest.approx(best.score, rel=1e-12)
        assert by_threes[number][0].table.tolist() == change.table.tolist()
        assert by_threes[number][0].places.tolist() == change.places.tolist()
    (scores,) = [each.scores for each in find_best_candidates(node_cost, [placed[0].pending(moved[0])])]
    assert together[0][1].score == scores.min()


def test_no_changes_have_no_best(node_cost):
    placed = _whole(node_cost, (0, 1, 2, 3))
    none = list_shifts(placed, np.arange(4)).take(0, 0)
    assert find_best_changes([placed], {0: none}) == {}


def test_only_a_change_that_gains_enough_is_made(node_cost):
    placed = _whole(node_cost, (0, 1, 2, 3))  # small tables: fewer senders are faster
    before = placed.score
    (change, best) = find_best_changes([placed], {0: list_shifts(placed, np.arange(4))})[0]
    assert best.score < before
    assert not placed.improve(change, best, gain=0.99)
    assert placed.score == before
    assert placed.improve(change, best, gain=0.0)
    assert placed.score == best.score
    assert placed.places[change.table[0], 0] == change.places[0, 0]


def test_sums_after_many_changes_are_those_anew(node_cost):
    placed, random = _whole(node_cost, (0, 1, 2, 3)), np.random.default_rng(0)
    for _ in range(20):
        changes = list_shifts(placed, np.arange(4))
        chosen = int(random.integers(changes.count))
        one = changes.take(chosen, chosen + 1)
        placed.apply(one, find_best_candidates(node_cost, [placed.pending(one)])[0])
    anew = Assignment(node_cost, placed.option, placed.places)
    assert placed.score == pytest.approx(anew.score, rel=1e-9)
    assert placed.memory == pytest.approx(anew.memory)
