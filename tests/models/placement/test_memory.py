from __future__ import annotations

import numpy as np
import pytest

from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement import Placement, Plan
from traincast.models.placement.greedy import WEIGHTS, make_greedy_plan, make_greedy_plans
from traincast.models.placement.memory import TERMS, MemoryLimits, check_sizes, compute_memory_need
from traincast.models.sharded_dlrm.config import Dense
from traincast.planner.sharding.search import rank_plans
from traincast.planner.sharding.task import make_task
from traincast.utils.errors import TraincastError

LIMITS = MemoryLimits(device=10e9, headroom=0.1)


def _table(name="user", **changes):
    fields = {"name": name, "rows": 1_000_000, "dim": 64, "pooling": Pooling.from_constant(5)}
    return Table(**{**fields, **changes})


def _need(table, placement, limits=LIMITS, batch_size=128, world_size=4):
    return compute_memory_need(Plan((table.name,), (placement,), world_size), (table,), limits, batch_size=batch_size)


def _term(need, term):
    return need.bytes[:, TERMS.index(term)]


def test_weights_are_where_the_plan_says():
    table = _table()
    whole = _term(_need(table, Placement("table_wise", (2,))), "weights")
    assert whole.tolist() == [0, 0, 256e6, 0]
    assert _term(_need(table, Placement.make_row_wise(4)), "weights").tolist() == [64e6] * 4
    assert _term(_need(table, Placement("column_wise", (0, 0, 1, 3))), "weights").tolist() == [128e6, 64e6, 0, 64e6]
    copied = _need(table, Placement.make_data_parallel(4))
    assert _term(copied, "weights").tolist() == [256e6] * 4
    assert _term(copied, "gradients").tolist() == [256e6] * 4


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("sgd", 0), ("adagrad", 256e6), ("rowwise_adagrad", 4e6), ("adam", 512e6)]
)
def test_optimizer_state_is_that_of_the_table(optimizer, expected):
    table = _table(optimizer=optimizer)
    state = _term(_need(table, Placement("table_wise", (0,))), "optimizer")
    assert state[0] == expected == table.memory_bytes - 256e6


def test_each_column_slice_keeps_row_wise_state_of_its_own():
    state = _term(_need(_table(optimizer="rowwise_adagrad"), Placement("column_wise", (0, 1))), "optimizer")
    assert state.tolist() == [4e6, 4e6, 0, 0]


def test_activations_grow_with_the_batch_of_all_ranks():
    table = _table(pooling=Pooling.from_constant(0))
    one = _need(table, Placement("table_wise", (0,)), batch_size=100)
    two = _need(table, Placement("table_wise", (0,)), batch_size=200)
    assert np.allclose(2 * _term(one, "activations"), _term(two, "activations"))
    # rank 0 pools the samples of all four ranks, then everyone has its own; gradients double both
    pooled = 2 * 100 * 64 * 4
    assert _term(one, "activations")[1] == pooled
    assert _term(one, "activations")[0] == 5 * pooled + 400 * 8


def test_tables_in_host_memory_leave_only_their_cache_on_the_device():
    need = _need(_table(optimizer="adam"), Placement("table_wise", (1,), "fused_uvm_caching", 0.25))
    assert _term(need, "weights")[1] == 64e6
    assert _term(need, "optimizer")[1] == 0
    assert need.host.tolist() == [0, 768e6, 0, 0]
    assert _term(_need(_table(), Placement("table_wise", (1,), "fused_uvm")), "weights")[1] == 0


def test_state_of_a_row_is_on_the_device_wherever_the_table_is():
    need = _need(_table(optimizer="rowwise_adagrad"), Placement("table_wise", (1,), "fused_uvm"))
    assert _term(need, "optimizer").tolist() == [0, 4e6, 0, 0]
    assert need.host.tolist() == [0, 256e6, 0, 0]


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 0), ("adagrad", 1), ("rowwise_adagrad", 1), ("adam", 2)])
def test_copied_tables_have_the_state_of_a_dense_optimizer(optimizer, copies):
    table = _table(optimizer=optimizer, dtype="fp16")
    assert _term(_need(table, Placement.make_data_parallel(4)), "optimizer").tolist() == [copies * 128e6] * 4


def test_what_is_missing_is_said():
    table = _table(rows=40_000_000)  # 10.24 GB
    short = _need(table, Placement("table_wise", (0,)))
    assert not short.fits
    assert short.missing == pytest.approx(10.24e9 - 9e9, abs=5e6)
    assert _need(table, Placement.make_row_wise(4)).missing == 0.0
    dense = MemoryLimits(device=10e9, headroom=0.1, dense=8e9)
    assert not _need(table, Placement.make_row_wise(4), dense).fits
    host = MemoryLimits(device=10e9, host=5e9)
    assert _need(table, Placement("table_wise", (0,), "fused_uvm"), host).missing == pytest.approx(5.24e9)


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
    assert compute_memory_need(plan, tables, LIMITS, batch_size=128).fits


def test_what_host_memory_lacks_is_said_of_the_rank_that_lacks_it():
    tables = [_table("host", rows=40_000_000), _table("device")]
    placements = (Placement("table_wise", (2,), "fused_uvm"), Placement("table_wise", (0,)))
    limits = MemoryLimits(device=10e9, host=5e9)
    need = compute_memory_need(Plan(("host", "device"), placements, 4), tables, limits, batch_size=128)
    assert need.fullest == (2, " of host memory")
    short = _need(_table(rows=40_000_000), Placement("table_wise", (3,)))
    assert short.fullest == (3, "")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dense", [None, "sgd", "adagrad", "adam"])
def test_the_fullest_rank_needs_no_less_than_the_peak_that_a_prediction_says(optimizer, dense):
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
    result = rank_plans(task, {"all": Plan(names, placements, 2)}).best
    peaks = {rank: own.memory.peak_bytes for own in result.prediction.ranks for rank in own.ranks}
    need = result.memory.device
    assert need.max() >= max(peaks.values())
    assert need.max() <= 1.25 * max(peaks.values())


def test_a_greedy_plan_leaves_room_for_what_every_rank_needs():
    tables = [_table(f"t{i}", rows=3_000_000, dim=128, pooling=Pooling.from_constant(100)) for i in range(17)]
    plan = make_greedy_plan(tables, WEIGHTS["greedy by size"], LIMITS, 4, batch_size=16384)
    assert compute_memory_need(plan, tables, LIMITS, batch_size=16384).missing == 0.0
