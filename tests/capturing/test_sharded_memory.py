"""Peak memory under `fully_shard`, counted by hand: a small stub for a model that fits no GPU whole."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from traincast.capturing import capture_distributed
from traincast.ir import compute_peak_memory

WIDTH, RANKS = 512, 64
WHOLE = 4 * WIDTH * WIDTH  # bytes of a layer's parameters
SHARD = WHOLE / RANKS


def peak(layers: int) -> int:
    def make_step(batch, *, rank, world_size):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).cuda()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.zeros(batch, WIDTH, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    workload = capture_distributed(make_step, world_size=RANKS, ranks=[0], batch_size=1, name="x", rebatch=False)
    return compute_peak_memory(workload.programs[0]).peak_bytes


def test_a_layer_more_takes_its_shards_and_no_whole_parameters():
    few, many = peak(8), peak(12)

    # parameter and two moments of every layer are held, gradients of those that backward has passed
    assert 3 * SHARD <= (many - few) / 4 <= 4.25 * SHARD
    # alongside them a few layers are whole: the one that computes, the one gathered ahead, what is reduced
    assert few - 8 * 4 * SHARD <= 5 * WHOLE
