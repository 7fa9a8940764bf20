"""The embedding tables of a written DLRM: lookup and fused update, by the papers' batched kernel or by FBGEMM's."""

from __future__ import annotations

from traincast.ir.ops import Phase, StorageKind
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.embeddings.optimizers import OPTIMIZER_STATE
from traincast.models.layers.builder import Ref, Scalars, StepBuilder
from traincast.models.layers.lookup import MODULE, TableBatchedLookup
from traincast.models.layers.optimizers import LEARNING_RATE


class BatchedTables:
    """All tables in one tensor, looked up by the papers' kernel; its backward applies SGD."""

    def __init__(self, builder: StepBuilder, config: DlrmConfig) -> None:
        self.builder, self.config = builder, config
        self.weights = builder.resident((sum(config.table_rows), config.embedding_dim), StorageKind.PARAMETER)
        self.starts = builder.resident((config.num_tables,), StorageKind.BUFFER, "int64")

    def lookup(self, indices: Ref, offsets: Ref, *, keep: bool) -> Ref:
        """Pooled embeddings [batch, tables, dim]. With `keep` (training) the indices stay for the backward pass."""
        builder, config = self.builder, self.config
        self.indices, self.offsets = indices, offsets
        builder.scope("LookupFunction", Phase.FORWARD)
        pooled = builder.new(((offsets.shape[0] - 1) // config.num_tables, config.num_tables, config.embedding_dim))
        name = "traincast::batched_embedding_forward"
        self.op = builder.op(name, self._arguments(), [pooled], _forms(config), module=MODULE)
        return pooled

    def update(self, grad: Ref) -> None:
        """The backward pass from the gradient of the pooled embeddings: updates the tables in place."""
        self.builder.scope("LookupFunctionBackward", Phase.BACKWARD)
        scalars = [*_forms(self.config), ("learning_rate", LEARNING_RATE)]
        arguments = [("grad", grad), *self._arguments()]
        name = "traincast::batched_embedding_backward_sgd"
        self.builder.op(name, arguments, [], scalars, module=MODULE, forward=self.op)
        self.builder.free(self.indices, self.offsets)

    def _arguments(self) -> list[tuple[str, Ref]]:
        tables = [("weights", self.weights), ("table_offsets", self.starts)]
        return [*tables, ("indices", self.indices), ("offsets", self.offsets)]


class FbgemmTables:
    """All tables in one flat tensor, looked up by FBGEMM's kernel on int64 indices."""

    def __init__(self, builder: StepBuilder, config: DlrmConfig) -> None:
        self.builder, self.config = builder, config
        elements, dims = sum(config.table_rows) * config.embedding_dim, config.num_tables * config.embedding_dim
        states = OPTIMIZER_STATE[config.optimizer].tensors
        self.kernel = TableBatchedLookup(
            builder=builder,
            tables=config.num_tables,
            weights=builder.resident((elements,), StorageKind.PARAMETER),
            states=[builder.resident((elements,), StorageKind.BUFFER) for _ in range(states)],
            forms=[("total_D", dims), ("max_D", config.embedding_dim), *_forms(config)],
            optimizer=config.optimizer,
        )

    def lookup(self, indices: Ref, offsets: Ref, *, keep: bool) -> Ref:
        """Pooled embeddings [batch, tables, dim]. With `keep` (training) the indices stay for the backward pass."""
        builder, count, dim = self.builder, self.config.num_tables, self.config.embedding_dim
        self.indices, wide_offsets = self.kernel.check(indices, offsets)
        flat = self.kernel.forward((offsets.shape[0] - 1) // count, count * dim)
        builder.scope("aten::view")
        pooled = builder.view(flat, (flat.shape[0], count, dim))
        self.view_op = builder.op("aten::view", [("self", flat)], [pooled], [("size", (-1, count, dim))], module=MODULE)
        if not keep:
            builder.free(self.indices, wide_offsets)
        return pooled

    def update(self, grad: Ref) -> None:
        """The backward pass from the gradient of the pooled embeddings: updates the tables in place."""
        batch, count, dim = grad.shape
        self.builder.scope("ViewBackward0", Phase.BACKWARD)
        flat = self.builder.view(grad, (batch, count * dim), (grad.spec.stride[0], 1))
        self.builder.reshaped(grad, flat, module=MODULE, forward=self.view_op)
        self.kernel.backward(flat)


def tables(builder: StepBuilder, config: DlrmConfig) -> BatchedTables | FbgemmTables:
    """The weights and constants of all tables, there before the step."""
    return BatchedTables(builder, config) if config.embedding == "batched" else FbgemmTables(builder, config)


def _forms(config: DlrmConfig) -> Scalars:
    forms: Scalars = [("rows", config.rows_per_table), ("dims", (config.embedding_dim,) * config.num_tables)]
    if not config.access:
        return forms
    return [*forms, ("pooling", config.lookups_per_table), ("access", config.access)]
