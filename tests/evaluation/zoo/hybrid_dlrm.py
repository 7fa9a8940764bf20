"""DLRM on many ranks as facebookresearch/dlrm trains it: each table on one rank, the MLPs on all of them.

Every rank looks its tables up for the samples of all ranks; an all-to-all hands each rank its samples, and another one
takes the gradients back. Both run while the bottom MLP computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from traincast.models.dlrm.config import DlrmConfig
from traincast.models.layers.optimizers import LEARNING_RATE
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.steps import OPTIMIZERS, Step, make_host_batch
from traincast_evaluation.zoo.define.dlrm import DotInteraction, make_mlp
from traincast_evaluation.zoo.define.embeddings import TABLES

Placement = Sequence[Sequence[int]]


def round_robin(num_tables: int, world_size: int) -> Placement:
    """Tables dealt out to ranks one by one.

    >>> [list(tables) for tables in round_robin(5, 2)]
    [[0, 2, 4], [1, 3]]
    """
    return [range(rank, num_tables, world_size) for rank in range(world_size)]


class Exchange:
    """One all-to-all of pooled embeddings and the one of their gradients. Sizes in elements."""

    def __init__(self, send: list[int], receive: list[int]) -> None:
        self.send, self.receive = send, receive
        self.work: Any = None
        self.result = torch.empty(0)

    def start(self, given: torch.Tensor, *, send: list[int], receive: list[int]) -> torch.Tensor:
        """Starts an all-to-all."""
        self.result = given.new_empty(sum(receive))
        self.work = dist.all_to_all_single(self.result, given, receive, send, async_op=True)
        return self.result

    def finish(self) -> torch.Tensor:
        """Waits for it."""
        self.work.wait()
        return self.result


class ExchangeRequest(torch.autograd.Function):
    """Starts the collective in forward; in backward waits for the gradients' one."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, pooled: torch.Tensor) -> torch.Tensor:
        """What has been received, once `ExchangeWait` has waited for it."""
        ctx.exchange = exchange
        return exchange.start(pooled, send=exchange.send, receive=exchange.receive)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gradients of the pooled embeddings of this rank's tables."""
        return None, ctx.exchange.finish()


class ExchangeWait(torch.autograd.Function):
    """Waits for the collective in forward; in backward starts the gradients' one."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, received: torch.Tensor) -> torch.Tensor:
        """What has been received."""
        ctx.exchange = exchange
        exchange.finish()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sends gradients back to where the tables are; `ExchangeRequest` waits for them."""
        exchange = ctx.exchange
        exchange.start(grads[0].contiguous(), send=exchange.receive, receive=exchange.send)
        return None, grads[0]


class HybridDlrm(nn.Module):
    """One rank's share of a DLRM."""

    def __init__(self, config: DlrmConfig, placement: Placement, rank: int) -> None:
        super().__init__()
        self.config, self.placement, self.rank = config, placement, rank
        self.bottom = DistributedDataParallel(make_mlp(config.bottom_mlp))
        self.top = DistributedDataParallel(make_mlp((config.top_input, *config.top_mlp), sigmoid_last=True))
        self.tables = TABLES[config.embedding](local_config(config, placement[rank])) if placement[rank] else None
        self.interaction = DotInteraction()

    def forward(self, dense: torch.Tensor, indices: Any, offsets: torch.Tensor) -> torch.Tensor:
        """Click probabilities [batch, 1]; indices are those of this rank's tables for the samples of all ranks."""
        batch, dim, ranks = len(dense), self.config.embedding_dim, len(self.placement)
        exchange = Exchange(
            send=[batch * dim * len(self.placement[self.rank])] * ranks,
            receive=[batch * dim * len(tables) for tables in self.placement],
        )
        received = ExchangeRequest.apply(exchange, self._pooled(indices, offsets, dense))
        x = self.bottom(dense)
        parts = ExchangeWait.apply(exchange, received).split(exchange.receive)
        embedded = [part.view(batch, -1) for part in parts if part.numel()]
        joined = torch.cat([x, *embedded], dim=1)
        if self.config.interaction == "dot":
            joined = self.interaction(x, joined.view(batch, -1, dim))
        return self.top(joined)

    def _pooled(self, indices: Any, offsets: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if self.tables is None:
            return like.new_empty(0).requires_grad_()
        pooled = self.tables(indices, offsets)
        return (torch.cat(pooled, dim=1) if isinstance(pooled, list) else pooled).reshape(-1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: fused embeddings update their tables in the backward pass."""
        if self.config.embedding == "bag":
            return list(self.parameters())
        return [*self.bottom.parameters(), *self.top.parameters()]


def local_config(config: DlrmConfig, tables: Sequence[int]) -> DlrmConfig:
    """The config with these tables only."""
    return replace(
        config,
        rows_per_table=tuple(config.rows_per_table[t] for t in tables),
        lookups_per_table=tuple(config.lookups_per_table[t] for t in tables),
    )


def hybrid_dlrm_step(
    config: DlrmConfig, placement: Placement | None = None, *, half: torch.dtype | None = None
) -> Callable[..., Step]:
    """A `make_step` for `capture_distributed`. `placement[rank]` are that rank's tables (default: dealt out in turn).

    The batch size is that of one rank. With `half` the forward pass runs under autocast.
    """

    def make(batch_size: int, *, rank: int, world_size: int) -> Step:
        where = round_robin(config.num_tables, world_size) if placement is None else placement
        if len(where) != world_size or sorted(t for tables in where for t in tables) != list(range(config.num_tables)):
            raise TraincastError(
                f"the placement must give each of {config.num_tables} tables to one of {world_size} ranks"
            )
        with torch.device("cuda"):
            model = HybridDlrm(config, where, rank)
        host = make_host_batch(config, batch_size, torch.float32)
        lookups = make_host_batch(local_config(config, where[rank]), batch_size * world_size, torch.float32)
        optimizer = OPTIMIZERS[config.optimizer](model.dense_parameters(), lr=LEARNING_RATE)
        criterion = nn.MSELoss() if config.loss == "mse" else nn.BCELoss()

        def forward(*given: Any) -> torch.Tensor:
            with nullcontext() if half is None else torch.autocast("cuda", half):
                probabilities = model(*given)
            return probabilities if half is None else probabilities.float()

        def step() -> None:
            indices = [each.to("cuda", non_blocking=True) for each in lookups.indices]
            offsets = lookups.offsets.to("cuda", non_blocking=True)
            dense = host.dense.to("cuda", non_blocking=True)
            target = host.target.to("cuda", non_blocking=True)
            optimizer.zero_grad()
            given = indices if config.embedding == "bag" else indices[0]
            criterion(forward(dense, given, offsets), target).backward()
            optimizer.step()

        return step

    return make
