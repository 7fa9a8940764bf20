"""Candidate shardings: who holds what, and that all differ."""

from __future__ import annotations

from traincast.models.embeddings.table import Pooling, Table
from traincast.models.placement.plan import ShardingKind, check_plan
from traincast_evaluation.trials.plans import BALANCED, draw_candidate_plans


def table(name, rows, pooling, dim=32):
    return Table(name=name, rows=rows, dim=dim, pooling=Pooling.from_constant(pooling))


TABLES = (table("a", 50_000, 1), table("b", 1_000, 30), table("c", 90_000, 9), table("d", 2_000, 20))


def holders(plan):
    return [placement.ranks[0] for placement in plan.placements]


def test_greedy_plans_put_the_heaviest_first_on_the_rank_with_the_least():
    plans = draw_candidate_plans(TABLES, 2, seed=0)
    assert holders(plans[BALANCED]) == [1, 0, 1, 1]  # 30 | 20, 9 alongside 20, 1 alongside 29
    assert holders(plans["greedy by size"]) == [1, 1, 0, 1]


def test_tables_in_turn_and_in_chunks():
    plans = draw_candidate_plans(TABLES, 2, seed=0)
    assert holders(plans["naive"]) == [0, 1, 0, 1]
    whole = [plan for plan in plans.values() if all(p.kind is ShardingKind.TABLE_WISE for p in plan.placements)]
    assert [0, 0, 1, 1] in [holders(plan) for plan in whole]  # chunked, perhaps under the name of an equal plan


def test_the_heaviest_table_is_cut_by_rows_and_by_columns_and_small_ones_are_copied():
    plans = draw_candidate_plans(TABLES, 2, seed=0)
    assert plans["heaviest by rows"].get_placement("b").kind is ShardingKind.ROW_WISE
    assert plans["heaviest by columns"].get_placement("b").kind is ShardingKind.COLUMN_WISE
    copied = [name for name in "abcd" if plans["small copied"].get_placement(name).kind is ShardingKind.DATA_PARALLEL]
    assert copied == ["b", "d"]  # 128 and 256 KiB


def test_columns_that_do_not_divide_are_not_cut():
    narrow = [table(name, 1_000, 1, dim=4) for name in "ab"]
    assert "heaviest by columns" not in draw_candidate_plans(narrow, 2, seed=0)


def test_every_plan_is_valid_and_none_is_there_twice():
    plans = draw_candidate_plans(TABLES, 2, seed=3)
    for plan in plans.values():
        check_plan(plan, TABLES, 2, 2)
    assert len({plan.placements for plan in plans.values()}) == len(plans)
    assert next(iter(plans)) == BALANCED
