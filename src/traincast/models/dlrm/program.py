"""A DLRM's step without torch: the ops a capture of `define.dlrm` records, written from its configuration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.ir.ops import ACCUMULATE_GRAD, Phase
from traincast.ir.program import Program
from traincast.ir.sizes import MONOMIALS, SizeTable
from traincast.ir.workload import STUDY_FRAMEWORK, Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.dlrm.tables import tables
from traincast.models.layers import interaction, loss, optimizers
from traincast.models.layers.builder import Ref, StepBuilder
from traincast.models.layers.mlp import Mlp
from traincast.utils.errors import TraincastError

# two primes no size of a model equals: a number means the same in both programs when it has the same place in both
_TWO_BATCHES = (1_000_003, 1_000_033)


def dlrm_workload(config: DlrmConfig, *, mode: str = "training") -> Workload:
    """The workload of a DLRM at its batch size, able to be re-batched. `embedding: bag` needs a capture."""
    if config.embedding == "bag":
        raise TraincastError("embedding 'bag' needs torch: capture the model, or use batched or fbgemm")
    program = _affine(*(write_dlrm(config, batch, mode=mode) for batch in _TWO_BATCHES))
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
    writer.step()
    return builder.build()


def _affine(first: Program, second: Program) -> Program:
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
        self.tables = tables(builder, config)
        self.top = Mlp(builder, "Dlrm.top", widths, last="sigmoid", input_grad=True, gradients=training)
        self.grads = [*self.bottom.grads(), *self.top.grads()]
        parameters = [*self.bottom.parameters(), *self.top.parameters()] if training else []
        self.stepped = optimizers.with_state(builder, config.optimizer, parameters)

    def step(self) -> None:
        """Everything."""
        if not self.training:
            self.builder.free(self._forward())
            return
        self.builder.scope("aten::ones", Phase.FORWARD)
        weights = self.builder.new((self.batch, 1), device="cpu")
        self.builder.op("aten::ones", [], [weights], [("size", (self.batch, 1)), ("dtype", None)])
        self.builder.free(weights)
        probabilities = self._forward()
        mean, target, loss_op = self._loss(probabilities)
        optimizers.zero_grad(self.builder, self.config.optimizer, self.grads)
        self._backward(probabilities, mean, target, loss_op)
        optimizers.step_one_by_one(self.builder, self.config.optimizer, self.stepped, self.grads)
        self.builder.free(probabilities, mean)

    def _forward(self) -> Ref:
        config, builder = self.config, self.builder
        indices = self.builder.copied_in((self.batch * config.lookups,), config.index_dtype)
        offsets = self.builder.copied_in((self.batch * config.num_tables + 1,), config.index_dtype)
        features = self.builder.copied_in((self.batch, config.bottom_mlp[0]), "float32")
        dense = self.bottom.forward(features, keep=self.training)
        pooled = self.tables.lookup(indices, offsets, keep=self.training)
        if config.interaction == "dot":
            self.interaction, joined = interaction.dot(builder, dense, pooled, keep=self.training)
        else:
            self.interaction = interaction.concatenate(builder, dense, pooled)
            joined = self.interaction.joined
        result = self.top.forward(joined, keep=self.training)
        builder.free(pooled)
        if not self.training:
            builder.free(indices, offsets, features, dense, joined)
        elif self.tables.indices is not indices:  # FBGEMM works on wider copies
            builder.free(indices, offsets)
        return result

    def _loss(self, probabilities: Ref) -> tuple[Ref, Ref, int]:
        builder = self.builder
        target = builder.copied_in((self.batch, 1), "float32")
        mean, op = loss.loss_forward(builder, self.config.loss, probabilities, target)
        builder.scope("aten::detach")
        detached = builder.view(mean, ())
        builder.op("aten::detach", [("self", mean)], [detached])
        builder.scope("aten::to")
        builder.free(builder.moved(detached, "cpu"))
        return mean, target, op

    def _backward(self, probabilities: Ref, mean: Ref, target: Ref, loss_op: int) -> None:
        builder = self.builder
        one = loss.begin_backward(builder, mean)
        grad = loss.loss_backward(builder, self.config.loss, one, probabilities, target, forward=loss_op)
        builder.free(target)
        grad = self.top.backward(grad)
        dot = self.config.interaction == "dot"
        below = interaction.dot_backward if dot else interaction.concatenate_backward
        to_dense, to_pooled = below(builder, self.interaction, grad)
        self.tables.update(to_pooled)
        # the tables' own gradient is none, but the engine visits them all the same
        builder.scope(ACCUMULATE_GRAD)
        builder.free(to_pooled)
        self.bottom.backward(to_dense)
        builder.free(one)
