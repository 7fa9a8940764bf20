"""Steps of two ranks that are run for real and captured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.fsdp import fully_shard

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
