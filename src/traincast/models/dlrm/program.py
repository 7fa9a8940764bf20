"""A DLRM's step without torch: the ops a capture of `define.dlrm` records, tables by the papers' batched kernel or
FBGEMM's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.ir.ops import ACCUMULATE_GRAD, Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.sizes import MONOMIALS, SizeTable
from traincast.ir.workload import STUDY_FRAMEWORK, Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.embeddings.table import OPTIMIZER_STATE
from traincast.models.layers import interaction, mlp, optimizers
from traincast.models.layers.builder import Ref, Scalars, StepBuilder
from traincast.models.layers.mlp import Mlp
from traincast.models.layers.optimizers import LEARNING_RATE, MODULE, TableBatchedLookup
from traincast.utils.errors import TraincastError


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


# two primes no size of a model equals: a number means the same in both programs when it has the same place in both
_TWO_BATCHES = (1_000_003, 1_000_033)


def build_dlrm_workload(config: DlrmConfig, *, mode: str = "training") -> Workload:
    """The workload of a DLRM at its batch size, able to be re-batched. `embedding: bag` needs a capture."""
    if config.embedding == "bag":
        raise TraincastError("embedding 'bag' needs torch: capture the model, or use batched or fbgemm")
    program = _make_affine_program(*(write_dlrm(config, batch, mode=mode) for batch in _TWO_BATCHES))
    return Workload(
        name=config.name,
        programs=(program.resized(config.batch_size, 0),),
        mode=mode,
        synchronised=True,
        framework_version=STUDY_FRAMEWORK,
        meta={"embedding": config.embedding, "optimizer": config.optimizer if mode == "training" else ""},
    )


def write_dlrm(config: DlrmConfig, batch: int, *, mode: str = "training") -> Program:
    """One step at one batch size."""
    builder = StepBuilder(batch)
    writer = _Writer(builder, config, batch, training=mode == "training")
    writer.write_step()
    return builder.build_program()


def _make_affine_program(first: Program, second: Program) -> Program:
    """The program that gives both: every size is a constant plus a multiple of the batch size."""
    if first.symbolic != second.symbolic:
        raise AssertionError("a size of the DLRM happens to equal one of another kind")
    step = second.batch_size - first.batch_size
    slope, rest = np.divmod(second.size_values - first.size_values, step)
    assert not rest.any()
    coefficients = np.zeros((len(slope), len(MONOMIALS)), dtype=np.int64)
    coefficients[:, 0] = first.size_values - slope * first.batch_size
    coefficients[:, 1] = slope
    return replace(first, sizes=SizeTable(coefficients, np.ones(len(slope), dtype=np.int64)))


class _Writer:
    """The parts of one step, in the order they run."""

    def __init__(self, builder: StepBuilder, config: DlrmConfig, batch: int, *, training: bool) -> None:
        self.builder, self.config, self.batch, self.training = builder, config, batch, training
        builder.engine_ops_apart = True
        widths = (config.top_input, *config.top_mlp)
        self.bottom = Mlp(builder, "Dlrm.bottom", config.bottom_mlp, input_grad=False, gradients=training)
        self.tables = make_tables(builder, config)
        self.top = Mlp(builder, "Dlrm.top", widths, last="sigmoid", input_grad=True, gradients=training)
        self.grads = [*self.bottom.list_gradients(), *self.top.list_gradients()]
        parameters = [*self.bottom.list_parameters(), *self.top.list_parameters()] if training else []
        self.stepped = optimizers.make_optimizer_state(builder, config.optimizer, parameters)

    def write_step(self) -> None:
        """Everything."""
        if not self.training:
            self.builder.free_tensors(self._write_forward())
            return
        self.builder.open_scope("aten::ones", Phase.FORWARD)
        weights = self.builder.add_tensor((self.batch, 1), device="cpu")
        self.builder.add_op("aten::ones", [], [weights], [("size", (self.batch, 1)), ("dtype", None)])
        self.builder.free_tensors(weights)
        probabilities = self._write_forward()
        mean, target, loss_op = self._write_loss(probabilities)
        optimizers.zero_grad(self.builder, self.config.optimizer, self.grads)
        self._write_backward(probabilities, mean, target, loss_op)
        optimizers.write_single_tensor_step(self.builder, self.config.optimizer, self.stepped, self.grads)
        self.builder.free_tensors(probabilities, mean)

    def _write_forward(self) -> Ref:
        config, builder = self.config, self.builder
        indices = self.builder.add_input_copy((self.batch * config.lookups,), config.index_dtype)
        offsets = self.builder.add_input_copy((self.batch * config.num_tables + 1,), config.index_dtype)
        features = self.builder.add_input_copy((self.batch, config.bottom_mlp[0]), "float32")
        dense = self.bottom.write_forward(features, keep=self.training)
        pooled = self.tables.write_lookup(indices, offsets, keep=self.training)
        if config.interaction == "dot":
            self.interaction, joined = interaction.write_dot(builder, dense, pooled, keep=self.training)
        else:
            self.interaction = interaction.write_concatenation(builder, dense, pooled)
            joined = self.interaction.joined
        result = self.top.write_forward(joined, keep=self.training)
        builder.free_tensors(pooled)
        if not self.training:
            builder.free_tensors(indices, offsets, features, dense, joined)
        elif self.tables.indices is not indices:  # FBGEMM works on wider copies
            builder.free_tensors(indices, offsets)
        return result

    def _write_loss(self, probabilities: Ref) -> tuple[Ref, Ref, int]:
        builder = self.builder
        target = builder.add_input_copy((self.batch, 1), "float32")
        mean, op = mlp.write_loss_forward(builder, self.config.loss, probabilities, target)
        builder.open_scope("aten::detach")
        detached = builder.add_view(mean, ())
        builder.add_op("aten::detach", [("self", mean)], [detached])
        builder.open_scope("aten::to")
        builder.free_tensors(builder.add_device_copy(detached, "cpu"))
        return mean, target, op

    def _write_backward(self, probabilities: Ref, mean: Ref, target: Ref, loss_op: int) -> None:
        builder = self.builder
        one = mlp.write_backward_start(builder, mean)
        grad = mlp.write_loss_backward(builder, self.config.loss, one, probabilities, target, forward=loss_op)
        builder.free_tensors(target)
        grad = self.top.write_backward(grad)
        dot = self.config.interaction == "dot"
        below = interaction.write_dot_backward if dot else interaction.write_concatenate_backward
        to_dense, to_pooled = below(builder, self.interaction, grad)
        self.tables.write_update(to_pooled)
        # the tables' own gradient is none, but the engine visits them all the same
        builder.open_scope(ACCUMULATE_GRAD)
        builder.free_tensors(to_pooled)
        self.bottom.write_backward(to_dense)
        builder.free_tensors(one)
