"""Changes worth trying, where a search begins, and how shards are dealt out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.sharding.conftest import table
from traincast.hardware.platform import load_platform
from traincast.models.placement import Placement, Plan, ShardingKind
from traincast.planner.sharding import local_search
from traincast.planner.sharding.assignment import NOWHERE, Assignment
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.local_search import (
    Effort,
    drop_equal_assignments,
    find_best_by_groups,
    find_busy_ranks,
    find_option_in_group,
    list_emptied_groups,
    list_other_options,
    list_shifts,
    list_starts,
    list_swaps,
    list_used_groups,
    make_starts,
    place_shards,
    sample_changes,
    search_locally,
)
from traincast.planner.sharding.result import make_task


def _placed(cost, *placements):
    names = tuple(one.name for one in cost.task.tables)
    return cost.assignment(Plan(names, placements, cost.task.gpus))


def _whole(cost, ranks):
    return _placed(cost, *(Placement("table_wise", (rank,)) for rank in ranks))


def _every_group(cost):
    return np.ones(len(cost.groups), dtype=bool)


def test_the_rank_with_everything_is_busy(node_cost):
    assert find_busy_ranks(_whole(node_cost, (2, 2, 2, 2))).tolist() == [2]


def test_no_rank_is_busier_where_all_are_equal(node_cost):
    assert find_busy_ranks(_placed(node_cost, *[Placement.make_row_wise(4)] * 4)).tolist() == []


def test_shards_of_busy_ranks_go_everywhere_else(node_cost):
    changes = list_shifts(_whole(node_cost, (0, 1, 0, 2)), np.array([0]))
    assert changes.count == 2 * 3
    assert sorted(zip(changes.table.tolist(), changes.places[:, 0].tolist(), strict=True)) == [
        (table, rank) for table in (0, 2) for rank in (1, 2, 3)
    ]


def test_tables_of_a_node_go_to_other_nodes(two_nodes_cost):
    node = Placement("table_row_wise", tuple(range(8)))
    changes = list_shifts(
        _placed(two_nodes_cost, node, Placement.make_row_wise(16), Placement.make_row_wise(16)), np.arange(16)
    )
    assert (changes.table.tolist(), changes.places[:, 0].tolist()) == ([0], [1])


def test_exchanges_are_between_ranks_that_differ(node_cost):
    assignment = _whole(node_cost, (0, 0, 1, 2))
    changes = list_swaps(assignment, np.array([0]), np.random.default_rng(0))
    assert changes.count == 2 * 2
    for number in range(changes.count):
        one = changes.take(number, number + 1)
        before = assignment.places[one.table, 0].tolist()
        assert one.places[:, 0].tolist() == before[::-1]


def test_of_too_many_changes_some_are_tried(node_cost, monkeypatch):
    monkeypatch.setattr(local_search, "MOST_CANDIDATES", 5)
    changes = list_shifts(_whole(node_cost, (0, 1, 2, 3)), np.arange(4))
    some = sample_changes(changes, np.random.default_rng(0))
    assert (changes.count, some.count) == (12, 5)
    pairs = set(zip(changes.table.tolist(), changes.places[:, 0].tolist(), strict=True))
    assert set(zip(some.table.tolist(), some.places[:, 0].tolist(), strict=True)) <= pairs
    few = sample_changes(some, np.random.default_rng(0))
    assert few is some
    assert list_swaps(_whole(node_cost, (0, 1, 2, 3)), np.arange(4), np.random.default_rng(0)).count <= 5


def test_other_options_leave_out_the_present_one_and_groups_that_are_not_wanted(node_cost):
    assignment, choices = _whole(node_cost, (0, 1, 2, 3)), node_cost.choices
    every = list_other_options(assignment, np.array([0]), np.zeros(4), _every_group(node_cost))
    assert assignment.option[0] not in every.option
    kinds = {choices.options[row].kind for row in every.option.tolist()}
    assert kinds == {ShardingKind.COLUMN_WISE, ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL}
    rows = np.array([group.kind is ShardingKind.ROW_WISE for group in node_cost.groups])
    only = list_other_options(assignment, np.array([0]), np.zeros(4), rows)
    assert [choices.options[row].kind for row in only.option.tolist()] == [ShardingKind.ROW_WISE]


def test_slices_go_to_the_ranks_with_least_to_do(node_cost):
    assignment, choices = _whole(node_cost, (0, 1, 2, 3)), node_cost.choices
    columns = np.array([group.kind is ShardingKind.COLUMN_WISE for group in node_cost.groups])
    changes = list_other_options(assignment, np.array([2]), np.array([9.0, 1.0, 5.0, 2.0]), columns)
    halves = [number for number, row in enumerate(changes.option) if choices.options[row].slices == 2]
    assert changes.places[halves, :2].tolist() == [[1, 3]]


def test_a_group_that_is_given_up_leaves_no_table_behind(node_cost):
    assignment = _placed(node_cost, Placement("table_wise", (0,)), *[Placement.make_row_wise(4)] * 3)
    changes = list_emptied_groups(assignment, _every_group(node_cost))
    current = node_cost.choices.group[assignment.option]
    for number in range(changes.count):
        one = changes.take(number, number + 1)
        (group,) = set(current[one.table].tolist())
        assert sorted(one.table.tolist()) == np.flatnonzero(current == group).tolist()
        assert group not in node_cost.choices.group[one.option]


def test_starts_differ_and_begin_with_all_tables_whole(node_cost):
    begun = list(list_starts(node_cost.choices, node_cost.weights))
    options = [option.tobytes() for option, _ in begun]
    assert len(options) == len(set(options)) > 4
    kinds = [node_cost.choices.options[row].kind for row in begun[0][0].tolist()]
    assert kinds == [ShardingKind.TABLE_WISE] * 4


def test_every_start_is_a_plan(two_nodes_cost):
    names = [one.name for one in two_nodes_cost.task.tables]
    for option, places in list_starts(two_nodes_cost.choices, two_nodes_cost.weights):
        plan = Assignment(two_nodes_cost, option, places).plan(names)
        assert plan.world_size == 16
        assert two_nodes_cost.assignment(plan).plan(names) == plan


def test_tables_that_do_not_fit_begin_in_host_memory():
    tables = [table(f"t{i}", 150_000_000, 128, optimizer="sgd") for i in range(2)]
    cost = FastCost(make_task(tables, load_platform("dgx-a100"), gpus=2, batch_size=64))
    hosts = [
        [cost.choices.options[row].kernel.in_host_memory for row in option.tolist()]
        for option, _ in list_starts(cost.choices, cost.weights)
    ]
    assert any(any(in_host) for in_host in hosts)


def test_the_option_of_a_group_is_light_enough_or_the_lightest(node_cost):
    choices, weights = node_cost.choices, node_cost.weights
    columns = next(n for n, group in enumerate(node_cost.groups) if group.kind is ShardingKind.COLUMN_WISE)
    rows = [row for row in choices.rows[2] if choices.group[row] == columns]
    assert find_option_in_group(choices, weights, 2, columns, np.inf) == rows[0]
    assert find_option_in_group(choices, weights, 2, columns, 0.0) == min(rows, key=lambda row: weights.seconds[row])
    assert find_option_in_group(choices, weights, 2, len(node_cost.groups), 1.0) == -1


def test_shards_are_spread_heaviest_first(node_cost):
    choices, weights = node_cost.choices, node_cost.weights
    option = np.array([rows[0] for rows in choices.rows])
    places = place_shards(choices, weights, option)
    assert sorted(places[:, 0].tolist()) == [0, 1, 2, 3]
    heaviest = int(np.argmax(weights.seconds[option]))
    assert places[heaviest, 0] == 0
    assert (places[:, 1:] == NOWHERE).all()


def test_tables_that_stay_are_counted_where_they_are(node_cost):
    choices, weights = node_cost.choices, node_cost.weights
    option = np.array([rows[0] for rows in choices.rows])
    fixed = np.full((4, choices.most_slices), NOWHERE)
    fixed[:, 0] = [0, 1, 2, 3]
    places = place_shards(choices, weights, option, fixed=(np.array([3]), fixed))
    assert places[:3, 0].tolist() == [0, 1, 2]
    assert places[3, 0] == 3


def test_a_full_rank_takes_no_more(node_cost):
    choices = node_cost.choices
    option = np.array([rows[0] for rows in choices.rows])
    need = node_cost.weights.device_bytes[option]
    tight = replace(node_cost.weights, capacity=float(need.max() + 1))
    load = np.zeros(4)
    np.add.at(load, place_shards(choices, tight, option)[:, 0], need)
    assert load.max() <= tight.capacity


def test_groups_in_use(node_cost):
    used = list_used_groups(_placed(node_cost, Placement.make_row_wise(4), *[Placement("table_wise", (0,))] * 3))
    assert [node_cost.groups[n].kind for n in np.flatnonzero(used)] == [ShardingKind.TABLE_WISE, ShardingKind.ROW_WISE]


def test_of_equal_sets_of_groups_the_best_counts(node_cost):
    apart, together = _whole(node_cost, (0, 1, 2, 3)), _whole(node_cost, (0, 0, 0, 0))
    assert together.score < apart.score
    rows = _placed(node_cost, *[Placement.make_row_wise(4)] * 4)
    firsts = find_best_by_groups([apart, rows, together])
    assert set(map(id, firsts)) == {id(together), id(rows)}
    assert firsts[0].score <= firsts[1].score


def test_equal_assignments_are_kept_once(node_cost):
    one, other = _whole(node_cost, (0, 1, 2, 3)), _whole(node_cost, (0, 0, 2, 3))
    kept = drop_equal_assignments([other, one, one.copy()])
    assert len(kept) == 2
    assert kept == sorted(kept, key=lambda each: each.score)


def test_however_short_the_time_there_is_an_answer(node_cost):
    best = min(each.score for each in make_starts(node_cost))
    effort = Effort(rounds=2, reach=1.15, deadline=0.0)
    assert effort.over
    found = search_locally(node_cost, effort, lambda _: None)
    assert found[0].score == pytest.approx(best)


def test_a_search_never_ends_above_its_starts_and_says_how_far_it_is(node_cost):
    parts = []
    begun = make_starts(node_cost)
    found = search_locally(node_cost, Effort(rounds=1, reach=1.15), parts.append)
    assert found[0].score <= min(each.score for each in begun)
    assert parts == sorted(parts)
    assert 0.0 < parts[0] <= parts[-1] <= 1.0
