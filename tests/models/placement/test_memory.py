from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import traincast
from traincast.hardware.platform import load_platform
from traincast.models.catalog import load_model
from traincast.models.dlrm.config import DLRM_DEFAULT
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement import Placement, Plan
from traincast.models.placement.memory import MemoryLimits, check_sizes, compute_common_bytes, compute_shard_bytes
from traincast.models.placement.options import WEIGHTS, make_greedy_plan, make_greedy_plans
from traincast.models.placement.plan import convert_plan_to_json
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.step import make_dlrm_tables
from traincast.planner.sharding.result import make_task
from traincast.planner.sharding.search import rank_plans
from traincast.utils.errors import TraincastError

LIMITS = MemoryLimits(device=10e9, headroom=0.1)


def _table(name="user", **changes):
    fields = {"name": name, "rows": 1_000_000, "dim": 64, "pooling": Pooling.from_constant(5)}
    return Table(**{**fields, **changes})


def _add_up(plan, tables, batch_size=128):
    """Device and host bytes of every rank, [ranks, 2]."""
    need = np.tile([compute_common_bytes(tables, batch_size=batch_size), 0.0], (plan.world_size, 1))
    for shard in plan.make_shards(tables):
        need[shard.rank] += compute_shard_bytes(
            tables[shard.table], plan.placements[shard.table], shard, batch_size=batch_size, world_size=plan.world_size
        )
    return need


def _need(table, placement, batch_size=128, world_size=4):
    """What a table needs of devices and hosts beyond one that ranks have no part of."""
    return _add_up(Plan((table.name,), (placement,), world_size), [table], batch_size)


def test_weights_are_where_the_plan_says():
    table = _table(pooling=Pooling.from_constant(0))

    def in_megabytes(placement):
        return [round(nbytes / 64e6) for nbytes in _need(table, placement, 1)[:, 0].tolist()]

    assert in_megabytes(Placement("table_wise", (2,))) == [0, 0, 4, 0]
    assert in_megabytes(Placement.make_row_wise(4)) == [1] * 4
    assert in_megabytes(Placement("column_wise", (0, 0, 1, 3))) == [2, 1, 0, 1]
    assert in_megabytes(Placement.make_data_parallel(4)) == [12] * 4  # with its gradient and the bucket of that


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("sgd", 0), ("adagrad", 256e6), ("rowwise_adagrad", 4e6), ("adam", 512e6)]
)
def test_optimizer_state_is_that_of_the_table(optimizer, expected):
    table, plain = _table(optimizer=optimizer), _table(optimizer="sgd")
    more = _need(table, Placement("table_wise", (0,))) - _need(plain, Placement("table_wise", (0,)))
    assert more[0, 0] == expected == table.memory_bytes - 256e6


def test_activations_grow_with_the_batch_of_all_ranks():
    table = _table(pooling=Pooling.from_constant(0), rows=4)
    one, two = (_need(table, Placement("table_wise", (0,)), batch_size=size)[:, 0] for size in (100, 200))
    # rank 0 pools the samples of all four ranks, then everyone has its own; gradients double both
    pooled, keys = 2 * 100 * 64 * 4, 100 * 8
    assert one[1] == pooled + keys
    assert one[0] - 4 * 64 * 4 == 5 * pooled + (4 * 2 + 1) * keys
    assert two[1] == 2 * one[1]


def test_tables_in_host_memory_leave_only_their_cache_and_the_state_of_rows_on_the_device():
    cached = Placement("table_wise", (1,), "fused_uvm_caching", 0.25)
    whole, host = Placement("table_wise", (1,)), Placement("table_wise", (1,), "fused_uvm")
    adam, by_row = _table(optimizer="adam"), _table(optimizer="rowwise_adagrad")
    assert (_need(adam, whole) - _need(adam, cached))[1].tolist() == pytest.approx([768e6 - 64e6, -768e6])
    assert (_need(by_row, whole) - _need(by_row, host))[1].tolist() == pytest.approx([256e6, -256e6])


def test_a_table_larger_than_all_memory_together_is_refused_by_name():
    limits = MemoryLimits(device=10e9, host=10e9)
    huge = _table("huge", rows=1 << 30, dim=128)
    with pytest.raises(TraincastError, match=r"table 'huge' needs 549.8 GB .* more than the 74.0 GB of 4 GPUs"):
        check_sizes([_table(), huge], limits, 4)
    check_sizes([_table()], limits, 4)


def test_a_greedy_plan_balances_its_weight():
    tables = [_table(f"t{i}", rows=1000 * (i + 1), dim=32 if i % 2 else 128) for i in range(9)]
    plans = make_greedy_plans(tables, LIMITS, 3, batch_size=128)
    assert set(plans) == {"greedy by size", "greedy by lookups", "greedy by rows"}
    for name, plan in plans.items():
        load = np.zeros(3)
        for table, placement in zip(tables, plan.placements, strict=True):
            assert placement.kind == "table_wise"
            load[placement.ranks[0]] += WEIGHTS[name](table)
        assert load.max() - load.min() <= max(WEIGHTS[name](table) for table in tables)


def test_a_greedy_plan_does_not_depend_on_the_order_of_the_tables():
    """By name, equal lookups put large tables together: the fullest rank held 1.83 times as much."""
    sizes = [1_000_000, 1000, 900_000, 2000, 800_000, 3000, 700_000, 4000]

    def bytes_by_rank(rows):
        tables = [
            Table(name=f"table{i}", rows=height, dim=64, pooling=Pooling.from_constant(1))
            for i, height in enumerate(rows)
        ]
        plan = make_greedy_plan(tables, WEIGHTS["greedy by lookups"], LIMITS, 4, batch_size=128)
        held = dict.fromkeys(range(4), 0)
        for table, placement in zip(tables, plan.placements, strict=True):
            held[placement.ranks[0]] += table.memory_bytes
        return held

    orders = [sizes, sizes[::-1], sorted(sizes), sizes[::2] + sizes[1::2]]
    assert all(bytes_by_rank(order) == bytes_by_rank(sizes) for order in orders)


def test_a_greedy_plan_splits_what_fits_nowhere():
    tables = [_table("huge", rows=60_000_000), _table("small")]
    plan = make_greedy_plan(tables, WEIGHTS["greedy by size"], LIMITS, 4, batch_size=128)
    assert [placement.kind for placement in plan.placements] == ["row_wise", "table_wise"]
    assert _add_up(plan, tables)[:, 0].max() <= LIMITS.for_tables


def test_what_host_memory_lacks_is_said_of_the_rank_that_lacks_it():
    tables = [_table("host", rows=40_000_000), _table("device")]
    placements = (Placement("table_wise", (2,), "fused_uvm"), Placement("table_wise", (0,)))
    task = make_task(tables, load_platform("dgx-a100"), gpus=4, batch_size=128)
    task = replace(task, limits=replace(task.limits, host=5e9))
    best = rank_plans(task, {"mine": Plan(("host", "device"), placements, 4)}).best
    assert best.missing == pytest.approx(10.24e9 - 5e9, rel=1e-3)
    assert best.state_missing() == "rank 2 lacks 5.2 GB of host memory"


def test_what_a_device_lacks_is_said_of_the_fullest_rank():
    tables = [_table("large", rows=200_000_000), _table("small")]
    placements = (Placement("table_wise", (3,)), Placement("table_wise", (0,)))
    task = make_task(tables, load_platform("dgx-a100"), gpus=4, batch_size=128)
    best = rank_plans(task, {"mine": Plan(("large", "small"), placements, 4)}).best
    assert not best.fits and best.missing > 51.2e9 - 40e9
    assert best.state_missing().startswith("rank 3 lacks 12.")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dense", [None, "sgd", "adagrad", "adam"])
def test_what_a_search_adds_up_is_no_less_than_the_peak_of_the_fullest_rank(optimizer, dense):
    names = ("whole", "rows", "columns", "copied", "cached")
    tables = [_table(name, rows=100_000, optimizer=optimizer) for name in names]
    placements = (
        Placement("table_wise", (1,)),
        Placement.make_row_wise(2),
        Placement("column_wise", (0, 1)),
        Placement.make_data_parallel(2),
        Placement("table_wise", (0,), "fused_uvm_caching", 0.2),
    )
    above = Dense(bottom_mlp=(13, 64), top_mlp=(1024, 1), interaction="cat", optimizer=dense) if dense else None
    task = make_task(tables, load_platform("dgx-a100"), gpus=2, batch_size=1024, dense=above)
    plan = Plan(names, placements, 2)
    result = rank_plans(task, {"all": plan}).best
    peak = max(memory.peak_bytes for memory in result.rank_memory)
    added = _add_up(plan, tables, 1024)[:, 0].max() + task.limits.dense
    assert peak <= added <= 1.25 * peak
    assert result.prediction.memory.host_bytes >= _add_up(plan, tables, 1024)[:, 1].max()


def test_a_greedy_plan_leaves_room_for_what_every_rank_needs():
    tables = [_table(f"t{i}", rows=3_000_000, dim=128, pooling=Pooling.from_constant(100)) for i in range(17)]
    plan = make_greedy_plan(tables, WEIGHTS["greedy by size"], LIMITS, 4, batch_size=16384)
    assert _add_up(plan, tables, 16384)[:, 0].max() <= LIMITS.for_tables


_NODES = {"dgx-a100": 8, "dgx1-v100": 4, "dgx-h100": 16}


@pytest.mark.parametrize("node", _NODES)
@pytest.mark.parametrize("kind", ["whole", "rows", "columns", "copied", "host", "cached", "mixed"])
def test_a_plan_needs_the_same_bytes_in_a_ranking_a_prediction_and_fits(node, kind, tmp_path):
    # Given a plan of a DLRM's tables
    gpus = _NODES[node]
    model = load_model("dlrm-default").name
    tables = make_dlrm_tables(DLRM_DEFAULT)
    kinds = {
        "whole": lambda i: Placement("table_wise", (i % gpus,)),
        "rows": lambda _: Placement.make_row_wise(gpus),
        "columns": lambda i: Placement("column_wise", (i % gpus, (i + 1) % gpus)),
        "copied": lambda _: Placement.make_data_parallel(gpus),
        "host": lambda i: Placement("table_wise", (i % gpus,), "fused_uvm"),
        "cached": lambda i: Placement("table_wise", (i % gpus,), "fused_uvm_caching", 0.2),
    }
    each = list(kinds.values())
    placements = tuple((each[i % 6] if kind == "mixed" else kinds[kind])(i) for i in range(len(tables)))
    plan = Plan(tuple(table.name for table in tables), placements, gpus)
    dense = Dense.from_dlrm(DLRM_DEFAULT)
    task = make_task(tables, load_platform(node), gpus=gpus, batch_size=512, dense=dense)

    # When it is ranked, predicted and asked whether it fits
    ranked = rank_plans(task, {"mine": plan}).best
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(convert_plan_to_json(plan)))
    options = {"on": node, "gpus": gpus, "batch_size": 512, "plan": str(path)}
    predicted, answer = traincast.predict(model, **options), traincast.fits(model, **options)

    # Then all say the same bytes, on the device and in host memory, of every rank
    said = predicted.memory.to_dict()
    assert ranked.prediction.memory.to_dict() == said == answer.memory.to_dict()
    assert (ranked.fits, ranked.missing) == (answer.fits, 0.0)
    for one in predicted.ranks:
        for rank in one.ranks:
            assert ranked.rank_memory[rank].peak_bytes <= one.memory.peak_bytes
    assert (said["host_gb"] > 0.25) == (kind in ("host", "cached", "mixed"))
