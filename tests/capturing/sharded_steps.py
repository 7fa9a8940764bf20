"""Steps of two ranks that are run for real and captured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.corpus.loops import GPT

BATCH, LENGTH = 4, 64


def fsdp2(rank: int, device: str) -> Callable[[], object]:
    """A small Transformer, each of its layers sharded."""
    model = GPT(layers=3, dim=96).to(device)
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.randint(0, 512, (BATCH, LENGTH), device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()

    return step


def tensor_parallel(batch: int, *, rank: int, world_size: int) -> Callable[[], object]:
    """Two layers split over all ranks, the first by columns and the second by rows."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).cuda()
    model = parallelize_module(layers, init_device_mesh("cuda", (world_size,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(batch, 16, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
