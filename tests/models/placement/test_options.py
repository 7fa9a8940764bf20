"""Ways to place a table that are worth trying, and greedy plans to compare with."""

from __future__ import annotations

import pytest

from traincast.models.embeddings import Pooling, Table
from traincast.models.placement import ComputeKernel, Placement, ShardingKind, check_plan
from traincast.models.placement.memory import MemoryLimits
from traincast.models.placement.options import (
    CACHE_FRACTIONS,
    MIN_COLUMNS,
    WEIGHTS,
    Option,
    find_option,
    list_table_options,
    make_greedy_plans,
)

ROOMY = MemoryLimits(device=40e9)


def _table(name="a", rows=100_000, dim=128, pooling=4, **changes):
    return Table(name=name, rows=rows, dim=dim, pooling=Pooling.from_constant(pooling), optimizer="sgd", **changes)


def _kinds(options):
    return [(option.kind.value, option.slices) for option in options]


def test_on_one_gpu_a_small_table_need_not_be_exchanged():
    small, large = list_table_options([_table(), _table("b", rows=20_000_000)], ROOMY, 1, 1)
    assert _kinds(small) == [("table_wise", 1), ("data_parallel", 0)]
    assert _kinds(large) == [("table_wise", 1)]


def test_in_a_node_a_table_is_whole_sliced_split_or_copied():
    (options,) = list_table_options([_table()], ROOMY, 8, 8)
    assert _kinds(options) == [
        ("table_wise", 1), ("column_wise", 1), ("column_wise", 2), ("column_wise", 4), ("row_wise", 0),
        ("data_parallel", 0),
    ]  # fmt: skip
    assert options[-1].kernel is ComputeKernel.DENSE


def test_between_nodes_the_rows_of_a_node_are_one_more_way():
    (options,) = list_table_options([_table()], ROOMY, 16, 8)
    assert ("table_row_wise", 1) in _kinds(options)


def test_slices_are_no_narrower_than_is_worth_it():
    (options,) = list_table_options([_table(dim=2 * MIN_COLUMNS)], ROOMY, 8, 8)
    assert [slices for kind, slices in _kinds(options) if kind == "column_wise"] == [1, 2]


def test_large_tables_are_not_copied():
    (options,) = list_table_options([_table(rows=20_000_000)], ROOMY, 8, 8)
    assert "data_parallel" not in dict(_kinds(options))


def test_host_memory_is_for_when_devices_are_full():
    big = [_table(f"t{i}", rows=60_000_000) for i in range(2)]
    (options, _) = list_table_options(big, ROOMY, 2, 2)
    hosts = [(option.kind, option.kernel, option.cache_fraction) for option in options if option.kernel.in_host_memory]
    assert {kind for kind, _, _ in hosts} == {ShardingKind.TABLE_WISE, ShardingKind.ROW_WISE}
    assert {share for _, kernel, share in hosts if kernel.cached} == set(CACHE_FRACTIONS)
    assert not any(option.kernel.in_host_memory for option in list_table_options(big, ROOMY, 8, 8)[0])


@pytest.mark.parametrize(
    ("option", "places", "ranks", "targets", "shape"),
    [
        (Option(ShardingKind.TABLE_WISE, 1), [5], (5,), 16, (1000, 64)),
        (Option(ShardingKind.COLUMN_WISE, 2), [9, 9], (9, 9), 16, (1000, 32)),
        (Option(ShardingKind.ROW_WISE, 0), [], tuple(range(16)), 16, (63, 64)),
        (Option(ShardingKind.TABLE_ROW_WISE, 1), [1], tuple(range(8, 16)), 2, (125, 64)),
        (Option(ShardingKind.DATA_PARALLEL, 0, ComputeKernel.DENSE), [], tuple(range(16)), 16, (1000, 64)),
    ],
)
def test_an_option_on_its_places_is_a_placement_and_back(option, places, ranks, targets, shape):
    placement = option.make_placement(places, 16, 8)
    assert placement == Placement(option.kind, ranks, option.kernel)
    assert find_option(placement) == option
    assert option.count_targets(16, 8) == targets
    assert option.shard_shape(_table(rows=1000, dim=64), 16, 8) == shape


def test_every_baseline_is_a_plan_for_the_tables():
    tables = [_table(f"t{i}", 1000 * (i + 1), pooling=i + 1) for i in range(5)]
    plans = make_greedy_plans(tables, ROOMY, 4, batch_size=64)
    assert set(plans) == set(WEIGHTS)
    for plan in plans.values():
        assert check_plan(plan, tables, 4, 4) == plan
