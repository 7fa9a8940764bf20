"""Our cost in TorchRec's planner."""

from __future__ import annotations

import numpy as np
import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC
from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.placement.plan import Placement, check_plan
from traincast.planner.sharding.result import make_task
from traincast.planner.torchrec.shard_costs import ShardCosts
from traincast.utils.errors import TraincastError

PLATFORM = load_platform("dgx-a100")


def some_tables(count: int = 7) -> list[Table]:
    generator = np.random.default_rng(0)
    return [
        Table(
            name=f"t{i}",
            rows=int(10 ** generator.uniform(3, 7)),
            dim=int(generator.choice([32, 64, 128])),
            pooling=Pooling.from_constant(float(generator.integers(1, 60))),
            access=Zipf(1.0),
            optimizer="rowwise_adagrad",
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def task():
    return make_task(some_tables(), PLATFORM, gpus=16, batch_size=1024)


@pytest.fixture(scope="module")
def costs(task):
    ways = [
        Placement("table_wise", (0,)),
        Placement("table_wise", (0,), "fused_uvm"),
        Placement.make_row_wise(16),
        Placement("table_row_wise", tuple(range(8))),
        Placement("column_wise", (0, 1)),
        Placement.make_data_parallel(16),
    ]
    return ShardCosts(task, [ways] * len(task.tables))


def test_what_a_shard_adds_grows_with_what_it_holds(task, costs):
    whole = [costs.seconds(i, Placement("table_wise", (3,))) for i in range(len(task.tables))]
    part = [costs.seconds(i, Placement.make_row_wise(16)) for i in range(len(task.tables))]

    assert all(min(each) >= 0 and sum(each) > 0 for each in (*whole, *part))
    for table, all_rows, some_rows in zip(task.tables, whole, part, strict=True):
        assert all_rows.backward > some_rows.backward, table
    work = [table.pooling.mean * table.dim for table in task.tables]
    forward = [each.forward for each in whole]
    assert np.corrcoef(np.argsort(np.argsort(work)), np.argsort(np.argsort(forward)))[0, 1] > 0.8


def test_host_memory_is_never_the_faster_place(task, costs):
    for number in range(len(task.tables)):
        device = costs.seconds(number, Placement("table_wise", (0,)))
        host = costs.seconds(number, Placement("table_wise", (0,), "fused_uvm"))
        assert sum(host) >= sum(device)


def test_copies_pay_for_their_gradients(task, costs):
    largest = max(range(len(task.tables)), key=lambda i: task.tables[i].rows * task.tables[i].dim)
    copied = costs.seconds(largest, Placement.make_data_parallel(16))

    assert copied.exchange_backward > copied.exchange_forward
    gradient = task.tables[largest].rows * task.tables[largest].dim * 4
    # it crosses the network, 25 GB/s for each of eight adapters of a node, about twice
    assert copied.exchange_backward > gradient / (8 * 25e9)


@NEEDS_TORCHREC
def test_torchrecs_planner_makes_a_valid_plan_with_our_cost_and_a_better_one(task):
    from traincast.planner.torchrec.estimator import plan_with_our_cost
    from traincast.planner.torchrec.planner import plan_with_torchrec

    kernels = ("fused", "dense")  # in device memory: fewer kinds of simulations to compile
    ours, theirs = plan_with_our_cost(task, kernels=kernels), plan_with_torchrec(task, kernels=kernels)

    assert check_plan(ours, task.tables, 16, 8) == ours
    both = ShardCosts(task, list(zip(ours.placements, theirs.placements, strict=True)))
    assert both.step_seconds(ours) <= 1.0001 * both.step_seconds(theirs)


@NEEDS_TORCHREC
def test_every_shard_of_the_search_space_gets_its_seconds(task):
    from traincast.planner.torchrec.estimator import make_planner_with_our_cost
    from traincast.planner.torchrec.planner import import_torchrec, make_embedding_modules, silence_torchrec

    with silence_torchrec():
        planner = make_planner_with_our_cost(task)
        sharders = [import_torchrec("distributed.embeddingbag").EmbeddingBagCollectionSharder()]
        options = planner._enumerator.enumerate(make_embedding_modules(task.tables), sharders)

    assert {option.name for option in options} == {table.name for table in task.tables}
    for option in options:
        assert all(shard.perf.total > 0 and np.isfinite(shard.perf.total) for shard in option.shards), option


@NEEDS_TORCHREC
def test_another_batch_size_or_other_tables_are_refused(task):
    from types import SimpleNamespace

    from traincast.planner.torchrec.estimator import make_perf_plugins

    estimator, model = make_perf_plugins(task)
    option = SimpleNamespace(
        name="t0", batch_size=64, shards=[None], sharding_type="table_wise", compute_kernel="fused"
    )
    with pytest.raises(TraincastError, match="batch size 64, the task for 1024"):
        estimator.estimate([option], {})
    option.batch_size, option.name = 1024, "other"
    with pytest.raises(TraincastError, match="table 'other', which the task does not have"):
        estimator.estimate([option], {})
    option.name, option.compute_kernel = "t0", "key_value"
    with pytest.raises(TraincastError, match="'t0': table_wise with kernel key_value has no cost here"):
        estimator.estimate([option], {})
    option.compute_kernel = "fused"
    with pytest.raises(TraincastError, match="has no table 't1'"):
        estimator.estimate([option], {})
    with pytest.raises(TraincastError, match="asked before the estimator"):
        model.rate([])
