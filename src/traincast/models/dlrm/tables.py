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
        self.weights = builder.add_resident_tensor(
            (sum(config.table_rows), config.embedding_dim), StorageKind.PARAMETER
        )
        self.starts = builder.add_resident_tensor((config.num_tables,), StorageKind.BUFFER, "int64")

    def write_lookup(self, indices: Ref, offsets: Ref, *, keep: bool) -> Ref:
        """Pooled embeddings [batch, tables, dim]. With `keep` (training) the indices stay for the backward pass."""
        builder, config = self.builder, self.config
        self.indices, self.offsets = indices, offsets
        builder.open_scope("LookupFunction", Phase.FORWARD)
        pooled = builder.add_tensor(
            ((offsets.shape[0] - 1) // config.num_tables, config.num_tables, config.embedding_dim)
        )
        name = "traincast::batched_embedding_forward"
        self.op = builder.add_op(name, self._list_arguments(), [pooled], _make_scalars(config), module=MODULE)
        return pooled

    def write_update(self, grad: Ref) -> None:
        """The backward pass from the gradient of the pooled embeddings: updates the tables in place."""
        self.builder.open_scope("LookupFunctionBackward", Phase.BACKWARD)
        scalars = [*_make_scalars(self.config), ("learning_rate", LEARNING_RATE)]
        arguments = [("grad", grad), *self._list_arguments()]
        name = "traincast::batched_embedding_backward_sgd"
        self.builder.add_op(name, arguments, [], scalars, module=MODULE, forward=self.op)
        self.builder.free_tensors(self.indices, self.offsets)

    def _list_arguments(self) -> list[tuple[str, Ref]]:
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
            weights=builder.add_resident_tensor((elements,), StorageKind.PARAMETER),
            states=[builder.add_resident_tensor((elements,), StorageKind.BUFFER) for _ in range(states)],
            forms=[("total_D", dims), ("max_D", config.embedding_dim), *_make_scalars(config)],
            optimizer=config.optimizer,
        )

    def write_lookup(self, indices: Ref, offsets: Ref, *, keep: bool) -> Ref:
        """Pooled embeddings [batch, tables, dim]. With `keep` (training) the indices stay for the backward pass."""
        builder, count, dim = self.builder, self.config.num_tables, self.config.embedding_dim
        self.indices, wide_offsets = self.kernel.write_bounds_check(indices, offsets)
        flat = self.kernel.write_forward((offsets.shape[0] - 1) // count, count * dim)
        builder.open_scope("aten::view")
        pooled = builder.add_view(flat, (flat.shape[0], count, dim))
        self.view_op = builder.add_op(
            "aten::view", [("self", flat)], [pooled], [("size", (-1, count, dim))], module=MODULE
        )
        if not keep:
            builder.free_tensors(self.indices, wide_offsets)
        return pooled

    def write_update(self, grad: Ref) -> None:
        """The backward pass from the gradient of the pooled embeddings: updates the tables in place."""
        batch, count, dim = grad.shape
        self.builder.open_scope("ViewBackward0", Phase.BACKWARD)
        flat = self.builder.add_view(grad, (batch, count * dim), (grad.spec.stride[0], 1))
        self.builder.add_reshape(grad, flat, module=MODULE, forward=self.view_op)
        self.kernel.write_backward(flat)


def make_tables(builder: StepBuilder, config: DlrmConfig) -> BatchedTables | FbgemmTables:
    """The weights and constants of all tables, there before the step."""
    return BatchedTables(builder, config) if config.embedding == "batched" else FbgemmTables(builder, config)


def _make_scalars(config: DlrmConfig) -> Scalars:
    forms: Scalars = [("rows", config.rows_per_table), ("dims", (config.embedding_dim,) * config.num_tables)]
    if not config.access:
        return forms
    return [*forms, ("pooling", config.lookups_per_table), ("access", config.access)]
