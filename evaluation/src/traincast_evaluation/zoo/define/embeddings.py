"""Three ways to look up the tables of a DLRM. Each is a module from (indices, offsets) to [batch, tables, dim]."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

import traincast_evaluation.zoo.define.embedding_ops  # noqa: F401  (registers the operators)
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.embeddings.table import OPTIMIZER_STATE
from traincast.models.layers.optimizers import LEARNING_RATE


class TableSizes(Protocol):
    """What tables of one width need to know of themselves."""

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        """Heights."""

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each that occupy device memory."""

    @property
    def num_tables(self) -> int:
        """How many."""

    @property
    def embedding_dim(self) -> int:
        """Their width."""

    @property
    def optimizer(self) -> str:
        """The update fused into the backward pass."""


class LookupFunction(torch.autograd.Function):
    """The papers' lookup: one kernel for all tables, and a backward that applies SGD to the rows it touched."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, *args: Any) -> torch.Tensor:
        """Pooled embeddings [batch, tables, dim]."""
        ctx.save_for_backward(weights, *args[:3])
        ctx.tables = args[3:]
        return torch.ops.traincast.batched_embedding_forward(weights, *args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Updates the tables in place."""
        torch.ops.traincast.batched_embedding_backward_sgd(grads[0], *ctx.saved_tensors, *ctx.tables, LEARNING_RATE)
        return (None,) * 6


class BatchedTables(nn.Module):
    """All tables in one tensor, looked up by one kernel."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.rows = config.rows_per_table
        self.dims = (config.embedding_dim,) * config.num_tables
        self.weights = nn.Parameter(torch.empty(sum(config.table_rows), config.embedding_dim))
        self.register_buffer("table_offsets", torch.empty(config.num_tables, dtype=torch.int64))

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Indices of all tables in table order, and where each (table, sample) bag starts."""
        return LookupFunction.apply(self.weights, self.table_offsets, indices, offsets, self.rows, self.dims)


class BagTables(nn.Module):
    """One `EmbeddingBag` per table with sparse gradients, as in facebookresearch/dlrm."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, config.embedding_dim, mode="sum", sparse=True) for rows in config.table_rows
        )

    def forward(self, indices: list[torch.Tensor], offsets: torch.Tensor) -> list[torch.Tensor]:
        """One index tensor per table; `offsets` is [tables, batch]. Gives one [batch, dim] per table."""
        return [bag(indices[k], offsets[k]) for k, bag in enumerate(self.bags)]


class SplitLookupFunction(torch.autograd.Function):
    """FBGEMM's table-batched lookup with the optimizer fused into its backward."""

    @staticmethod
    def forward(ctx: Any, optimizer: str, sizes: tuple[int, int], tables: tuple[Any, Any], *tensors: Any) -> Any:
        """Pooled embeddings [batch, sum of dims]."""
        weights, starts, columns, indices, offsets, *_ = tensors
        ctx.optimizer, ctx.sizes, ctx.tables = optimizer, sizes, tables
        ctx.save_for_backward(*tensors)
        lookup = torch.ops.traincast_zoo_fbgemm.split_embedding_codegen_forward_unweighted_cuda
        return lookup(weights, starts, columns, *sizes, indices, offsets, *tables)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Updates the tables in place."""
        weights, starts, columns, indices, offsets, *state = ctx.saved_tensors
        update = getattr(
            torch.ops.traincast_zoo_fbgemm, f"split_embedding_backward_codegen_{ctx.optimizer}_unweighted_exact_cuda"
        )
        update(grads[0], weights, starts, columns, *ctx.sizes, indices, offsets, *ctx.tables, *state, LEARNING_RATE)
        return (None,) * (8 + len(state))


class FbgemmTables(nn.Module):
    """FBGEMM's `SplitTableBatchedEmbeddingBags`: indices widened to int64, checked, looked up.

    Without pooling every lookup is a bag of its own.
    """

    def __init__(self, config: TableSizes) -> None:
        super().__init__()
        self.optimizer = config.optimizer
        tables, dim = config.num_tables, config.embedding_dim
        self.rows, self.dims = config.rows_per_table, (dim,) * tables
        elements = sum(config.table_rows) * dim
        self.weights = nn.Parameter(torch.empty(elements))
        self.register_buffer("weights_offsets", torch.empty(tables, dtype=torch.int64))
        self.register_buffer("d_offsets", torch.empty(tables + 1, dtype=torch.int32))
        self.register_buffer("rows_per_table", torch.empty(tables, dtype=torch.int64))
        self.register_buffer("warning", torch.empty(1, dtype=torch.int64))
        per_state = sum(config.table_rows) if self.optimizer == "rowwise_adagrad" else elements
        for i in range(OPTIMIZER_STATE[self.optimizer].tensors):
            self.register_buffer(f"momentum{i + 1}", torch.empty(per_state))

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Indices of all tables in table order, and where each (table, sample) bag starts."""
        indices, offsets = indices.long(), offsets.long()
        torch.ops.traincast_zoo_fbgemm.bounds_check_indices(self.rows_per_table, indices, offsets, 1, self.warning)
        state = [getattr(self, f"momentum{i + 1}") for i in range(OPTIMIZER_STATE[self.optimizer].tensors)]
        pooled = SplitLookupFunction.apply(
            self.optimizer, (sum(self.dims), max(self.dims)), (self.rows, self.dims),
            self.weights, self.weights_offsets, self.d_offsets, indices, offsets, *state,
        )  # fmt: skip
        return pooled.view(-1, len(self.dims), self.dims[0])


TABLES: dict[str, type[nn.Module]] = {"batched": BatchedTables, "bag": BagTables, "fbgemm": FbgemmTables}
