"""Our models as a hardware configuration of TorchRec's newest estimator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC
from tests.planner.torchrec.test_estimator import some_tables
from traincast.hardware.platform import load_platform
from traincast.models.placement.plan import check_plan
from traincast.planner.sharding.result import make_task
from traincast.planner.torchrec.perf_config import _Times, register_perf_config
from traincast.planner.torchrec.planner import make_topology
from traincast.utils.errors import TraincastError


@pytest.fixture(scope="module")
def task():
    return make_task(some_tables(), load_platform("dgx-a100"), gpus=16, batch_size=1024)


def shard(name="t0", kind="table_wise", kernel="fused", dim=64, world=16, cached=None):
    return SimpleNamespace(
        table_name=name, sharding_type=kind, compute_kernel=kernel, emb_dim=dim, world_size=world, caching_ratio=cached
    )


def test_a_shard_takes_longer_in_host_memory_and_a_cache_lies_between(task):
    times = _Times(task)
    busiest = max(task.tables, key=lambda table: table.pooling.mean * table.dim)
    device, cached, host = (
        times.of(shard(busiest.name, kernel=kernel, dim=busiest.dim, cached=share))
        for kernel, share in (("fused", None), ("fused_uvm_caching", 0.3), ("fused_uvm", None))
    )
    assert device.forward < cached.forward < host.forward
    assert device.backward < host.backward
    assert device.outputs == host.outputs > 0


@NEEDS_TORCHREC
def test_torchrec_finds_our_times_by_name(task):
    from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory

    assert register_perf_config(task) == ("traincast", "traincast-dgx-a100")
    made = EmbeddingPerfEstimatorFactory.create("traincast", topology=make_topology(task))
    assert made._config.name.startswith("traincast-")
    assert {"traincast", "traincast-dgx-a100"} <= set(EmbeddingPerfEstimatorFactory._registry)


def test_ways_of_sharding_exchange_what_they_do(task):
    times = _Times(task)
    table = task.tables[0]
    whole, rows, copied = (
        times.of(shard(table.name, kind, kernel, table.dim))
        for kind, kernel in (("table_wise", "fused"), ("row_wise", "fused"), ("data_parallel", "dense"))
    )
    assert rows.forward < whole.forward
    assert (copied.inputs, copied.outputs) == (0.0, 0.0) and copied.gradients > 0
    halves = times.of(shard(table.name, "column_wise", "fused", table.dim // 2))
    assert halves.outputs < whole.outputs


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (shard("unknown"), "TorchRec's planner asks for table 'unknown', which the task does not have"),
        (shard(world=8), "TorchRec plans for 8 GPUs, the task for 16; give one"),
        (shard(kernel="key_value"), "table 't0': table_wise with kernel key_value has no cost here"),
        (shard(kind="grid_shard"), "table 't0': grid_shard with kernel fused has no cost here"),
    ],
)
def test_what_the_task_does_not_know_is_refused_by_name(task, asked, words):
    with pytest.raises(TraincastError, match=words) as caught:
        _Times(task).of(asked)
    assert "\n" not in str(caught.value)


@NEEDS_TORCHREC
def test_torchrecs_own_planner_plans_with_our_configuration(task):
    """Given the real package, when its newest estimator asks our configuration, then shards cost what we say and the
    plan is one that can be run."""
    from traincast.planner.torchrec.perf_config import make_perf_estimator
    from traincast.planner.torchrec.planner import (
        import_torchrec,
        make_constraints,
        make_reservation,
        make_topology,
        run_planner,
        silence_torchrec,
    )

    planner, hardware = import_torchrec("distributed.planner"), make_topology(task)
    wanted = make_constraints(task.tables, ["fused"])
    storage = planner.shard_estimators.EmbeddingStorageEstimator(topology=hardware, constraints=wanted)
    enumerator = planner.enumerators.EmbeddingEnumerator(
        topology=hardware,
        batch_size=task.batch_size,
        constraints=wanted,
        estimator=[make_perf_estimator(task), storage],
    )
    with silence_torchrec():
        plan = run_planner(
            planner.EmbeddingShardingPlanner(
                topology=hardware, batch_size=task.batch_size, constraints=wanted, enumerator=enumerator,
                storage_reservation=make_reservation(task.limits), stats=[], debug=False,
            ),
            task,
        )  # fmt: skip
    check_plan(plan, task.tables, task.gpus, task.gpus_per_node)
    (first,) = [option for option in enumerator.last_stored_search_space or [] if option.name == "t0"][:1]
    expected = _Times(task).of(shard("t0", first.sharding_type, first.compute_kernel, first.shards[0].size[1]))
    assert first.shards[0].perf.fwd_compute == pytest.approx(1e3 * expected.forward)
