"""Captured steps of many ranks, predicted: DDP, FSDP on a mesh, hybrid-parallel DLRM, messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.capturing.test_distributed import COLLECTIVES, WORLD
from tests.evaluation.zoo.hybrid_dlrm import hybrid_dlrm_step
from traincast.capturing import capture_distributed
from traincast.hardware import load_platform
from traincast.models.dlrm.config import DlrmConfig
from traincast.simulator.prediction.prediction import predict_step

WIDTH = 1024


def trained(model, rank, batch):
    """A step of SGD on a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(batch, WIDTH, device=f"cuda:{rank}")

    def step():
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    return step


def layers(rank):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(f"cuda:{rank}")


def ddp(batch, *, rank, world_size):
    return trained(DistributedDataParallel(layers(rank), device_ids=[rank], bucket_cap_mb=4), rank, batch)


def fsdp(batch, *, rank, world_size):
    model = layers(rank)
    mesh = init_device_mesh("cuda", (2, world_size // 2), mesh_dim_names=("replicas", "shards"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return trained(fully_shard(model, mesh=mesh), rank, batch)


def predicted(make_step, *, world_size=4, batch=256, on="dgx-a100"):
    workload = capture_distributed(make_step, world_size=world_size, batch_size=batch, name="x", rebatch=False)
    result = predict_step(workload, load_platform(on))
    assert result.estimated_ops == ()
    assert sum(part.seconds for part in result.path) == pytest.approx(result.iteration)
    return result


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_predicted(name):
    def make_step(batch, *, rank, world_size):
        return lambda: COLLECTIVES[name][0](rank)

    result = predicted(make_step, world_size=WORLD)

    assert result.by_family["collective"] > 4e-6
    assert len(result.ranks) == 1


def test_data_parallel_ranks_are_walked_once_and_hide_their_sums():
    result = predicted(ddp, batch=4096)

    assert [rank.ranks for rank in result.ranks] == [(0, 1, 2, 3)]
    assert 0 <= result.exposed_comm < 0.5 * result.by_family["collective"]


def test_sharded_replicas_on_a_mesh_are_one_class():
    # Given eight ranks, each in a group of four that shards and one of two that replicates
    result = predicted(fsdp, world_size=8)

    assert len(result.workload.programs) > 1
    assert [rank.ranks for rank in result.ranks] == [tuple(range(8))]


def test_hybrid_dlrm_waits_for_the_rank_with_most_tables():
    # Given one rank with a large table and three with small ones
    config = DlrmConfig(
        name="uneven", bottom_mlp=(13, 512, 64), top_mlp=(512, 1), rows_per_table=(10_000_000, 1000, 1000, 1000),
        embedding_dim=64, lookups_per_table=(100, 1, 1, 1),
    )  # fmt: skip

    result = predicted(hybrid_dlrm_step(replace(config, embedding="fbgemm")), batch=2048)

    heavy, *light = result.ranks
    assert heavy.ranks == (0,)
    assert all(rank.waiting > heavy.waiting for rank in light)
    assert result.imbalance > 0.05


def test_messages_both_ways_at_once_do_not_block():
    def make_step(batch, *, rank, world_size):
        x, y = torch.zeros(batch, 64, device="cuda"), torch.zeros(batch, 64, device="cuda")

        def step():
            other = 1 - rank
            operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return step

    result = predicted(make_step, world_size=2)

    assert result.by_family["collective"] > 0
