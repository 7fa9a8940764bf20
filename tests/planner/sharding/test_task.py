from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.sharding.conftest import table
from traincast.hardware.platform import load_platform
from traincast.models.sharded_dlrm.dense import Dense
from traincast.planner.sharding.result import MAX_BATCH, MAX_GPUS, make_task
from traincast.utils.errors import TraincastError

NODE = load_platform("dgx-a100")


def test_a_task_knows_its_nodes(node_task, two_nodes_task):
    assert (node_task.gpus_per_node, node_task.nodes) == (4, 1)
    assert (two_nodes_task.gpus_per_node, two_nodes_task.nodes) == (8, 2)
    assert node_task.device.key == node_task.platform.device.key
    assert node_task.device.host_sharers == 2  # of a DGX A100, two GPUs share a link to the host


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, f"gpus=0.; give an integer from 1 to {MAX_GPUS}"),
        ({"gpus": MAX_GPUS + 8}, "gpus=1032"),
        ({"gpus": 12}, "gpus=12. does not fill nodes of 8 GPUs; give a multiple of 8, or fewer than that"),
        ({"batch_size": 0}, f"give samples per GPU, from 1 to {MAX_BATCH}"),
        ({"tables": [table("a", optimizer="none")]}, "table 'a' has optimizer 'none'; plans are made for training"),
        ({"tables": [table("a"), table("a")]}, "'a'"),
        ({"tables": [table("a", 2_000_000_000, 1024, optimizer="adam")]}, "'a' needs .* GB with its optimizer state"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    asked = {"tables": [table("a")], "gpus": 8, "batch_size": 64} | changes
    with pytest.raises(TraincastError, match=message):
        make_task(asked.pop("tables"), NODE, **asked)


def test_the_dense_part_takes_memory_from_the_tables():
    dense = Dense(bottom_mlp=(13, 4096, 64), top_mlp=(4096, 1), interaction="cat")
    alone, beside = (make_task([table("a")], NODE, gpus=2, batch_size=64, dense=part) for part in (None, dense))
    assert alone.limits.dense == 0.0
    assert beside.limits.dense == dense.compute_memory_bytes(64, 64) > 0.0
    assert beside.limits.for_tables == alone.limits.for_tables - beside.limits.dense


def test_a_platform_without_links_is_refused_when_they_are_asked_for():
    task = make_task([table("a")], load_platform("a100-80gb"), gpus=1, batch_size=64)
    with pytest.raises(TraincastError, match="'a100-80gb' says nothing of the links between its GPUs; name a node"):
        _ = task.topology
    assert replace(task, platform=NODE).topology is NODE.topology
