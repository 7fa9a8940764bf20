"""TorchRec's own planner, told of our platforms."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC
from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement.memory import MemoryLimits
from traincast.models.placement.plan import check_plan
from traincast.planner.sharding.result import Task, make_task
from traincast.planner.torchrec.planner import make_reservation, make_topology, plan_with_torchrec, silence_torchrec
from traincast.utils.errors import TraincastError

pytestmark = NEEDS_TORCHREC
NODE = "dgx-a100"
PLATFORM = load_platform(NODE)
LIMITS = MemoryLimits(device=PLATFORM.device.memory_bytes)


def tables(count: int = 6, rows: int = 1_000_000) -> list[Table]:
    return [
        Table(
            name=f"t{i}", rows=rows * (i + 1), dim=64, pooling=Pooling.from_constant(10.0), optimizer="rowwise_adagrad"
        )
        for i in range(count)
    ]


def task(chosen: list[Table], gpus: int) -> Task:
    return make_task(chosen, PLATFORM, gpus=gpus, batch_size=512)


def test_it_plans_for_our_tables_and_its_plan_is_valid():
    chosen = tables()

    plan = plan_with_torchrec(task(chosen, 4))

    assert check_plan(plan, chosen, 4, 8) == plan
    assert any(placement.kind == "table_wise" for placement in plan.placements)


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
def test_it_tries_only_the_kernels_asked_for(kernel):
    plan = plan_with_torchrec(task(tables(), 4), kernels=(kernel,))

    assert {placement.kernel for placement in plan.placements} == {kernel}


def test_two_nodes():
    chosen = tables(4)

    plan = plan_with_torchrec(task(chosen, 16))

    assert check_plan(plan, chosen, 16, 8) == plan


def test_a_table_too_large_for_a_device_is_split_or_moved_to_the_host():
    large = [Table(name="large", rows=200_000_000, dim=128, pooling=Pooling.from_constant(1.0))]  # 102 GB

    plan = plan_with_torchrec(task(large, 8))

    assert plan.placements[0].kind in ("row_wise", "table_row_wise") or plan.placements[0].kernel.in_host_memory


def test_tables_that_fit_nowhere_are_an_answer_in_one_line():
    # each rank has room for some of its rows, but not alongside the dense part
    half = [Table(name=f"huge{i}", rows=800_000_000, dim=256, pooling=Pooling.from_constant(1.0)) for i in range(2)]
    huge = task(half, 8)

    with pytest.raises(TraincastError, match="TorchRec's planner found no plan for 8 GPUs") as raised:
        plan_with_torchrec(huge)

    assert "\n" not in str(raised.value)


def test_the_topology_is_that_of_the_platform():
    with silence_torchrec():
        topology = make_topology(task(tables(), 16))

    assert (topology.world_size, topology.local_world_size) == (16, 8)
    assert topology.devices[0].storage.hbm == int(PLATFORM.device.memory_bytes)
    # bytes a millisecond
    assert topology.hbm_mem_bw == pytest.approx(PLATFORM.device.dram_bandwidth / 1e3)
    assert topology.intra_host_bw == pytest.approx(300e9 / 1e3)
    assert topology.inter_host_bw == pytest.approx(25e9 / 1e3)


def test_a_lone_device_has_no_links_to_plan_for():
    alone = make_task(tables(), load_platform("a100-40gb"), gpus=1, batch_size=512)

    with pytest.raises(TraincastError, match="'a100-40gb' says nothing of the links"):
        make_topology(alone)


def test_the_dense_part_takes_its_memory():
    half = replace(LIMITS, dense=0.5 * LIMITS.device)

    assert make_reservation(half)._percentage == pytest.approx(0.65)
    with pytest.raises(TraincastError, match="leaves no memory for tables"):
        make_reservation(replace(LIMITS, dense=LIMITS.device))


def test_quiet_gives_the_log_back():
    before = logging.root.manager.disable
    with silence_torchrec():
        assert logging.root.manager.disable == logging.WARNING
    assert logging.root.manager.disable == before
