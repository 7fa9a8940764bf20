"""A DLRM's step without torch: the ops a capture of `define.dlrm` records, written from its configuration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.errors import TraincastError
from traincast.programs.dlrm import interaction, layers, optimizers, tables
from traincast.programs.dlrm.config import DlrmConfig
from traincast.programs.tape import Ref, Scalars, Tape
from traincast.workload.ops import Phase, StorageKind
from traincast.workload.program import Program
from traincast.workload.sizes import MONOMIALS, SizeTable
from traincast.workload.workload import Workload

FRAMEWORK = "1.8"
# two primes no size of a model equals: a number means the same in both programs when it has the same place in both
_TWO_BATCHES = (1_000_003, 1_000_033)
_COPY: Scalars = (("dtype", None), ("non_blocking", False), ("memory_format", None))


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
        framework_version=FRAMEWORK,
        meta={"embedding": config.embedding, "optimizer": config.optimizer if mode == "training" else ""},
    )


def write_dlrm(config: DlrmConfig, batch: int, *, mode: str = "training") -> Program:
    """One step at one batch size."""
    tape = Tape(batch)
    writer = _Writer(tape, config, batch, training=mode == "training")
    writer.step()
    return tape.build()


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

    def __init__(self, tape: Tape, config: DlrmConfig, batch: int, *, training: bool) -> None:
        self.tape, self.config, self.batch, self.training = tape, config, batch, training
        widths = (config.top_input, *config.top_mlp)
        self.bottom = layers.layers(tape, "Dlrm.bottom", config.bottom_mlp, gradients=training)
        self.tables = tables.tables(tape, config)
        self.top = layers.layers(tape, "Dlrm.top", widths, last="sigmoid", gradients=training)
        self.stepped = optimizers.with_state(tape, config.optimizer, self._parameters()) if training else []

    def _parameters(self) -> list[tuple[Ref, Ref]]:
        pairs = []
        for layer in (*self.bottom, *self.top):
            assert layer.weight_grad is not None and layer.bias_grad is not None
            pairs += [(layer.weight, layer.weight_grad), (layer.bias, layer.bias_grad)]
        return pairs

    def step(self) -> None:
        """Everything."""
        if not self.training:
            self.tape.free(self._forward())
            return
        self.tape.scope("aten::ones", Phase.FORWARD)
        weights = self.tape.new((self.batch, 1), device="cpu")
        self.tape.op("aten::ones", [], [weights], [("size", (self.batch, 1)), ("dtype", None)])
        self.tape.free(weights)
        probabilities = self._forward()
        loss, target, loss_op = self._loss(probabilities)
        optimizers.zero_grad(self.tape, self.config.optimizer, self.stepped)
        self._backward(probabilities, loss, target, loss_op)
        optimizers.step(self.tape, self.config.optimizer, self.stepped)
        self.tape.free(probabilities, loss)

    def _copied(self, shape: tuple[int, ...], dtype: str) -> Ref:
        """An input copied from pinned host memory."""
        host = self.tape.resident(shape, StorageKind.INPUT, dtype, "cpu:pinned")
        self.tape.scope("aten::to", Phase.INPUT)
        copied = self.tape.new(shape, dtype)
        self.tape.op("aten::_to_copy", [("self", host)], [copied], _COPY)
        return copied

    def _forward(self) -> Ref:
        config, tape = self.config, self.tape
        indices = self._copied((self.batch * config.lookups,), config.index_dtype)
        offsets = self._copied((self.batch * config.num_tables + 1,), config.index_dtype)
        given = self._copied((self.batch, config.bottom_mlp[0]), "float32")
        dense = layers.forward(tape, self.bottom, given, keep=self.training)
        pooled = tables.lookup(tape, self.tables, indices, offsets, keep=self.training)
        if config.interaction == "dot":
            self.interaction, joined = interaction.dot(tape, dense, pooled, keep=self.training)
        else:
            self.interaction = interaction.concatenate(tape, dense, pooled)
            joined = self.interaction.joined
        result = layers.forward(tape, self.top, joined, keep=self.training)
        tape.free(pooled)
        if not self.training:
            tape.free(indices, offsets, given, dense, joined)
        elif self.tables.indices is not indices:  # FBGEMM works on wider copies
            tape.free(indices, offsets)
        return result

    def _loss(self, probabilities: Ref) -> tuple[Ref, Ref, int]:
        tape, mse = self.tape, self.config.loss == "mse"
        target = self._copied((self.batch, 1), "float32")
        if mse:
            tape.scope("aten::broadcast_tensors")
        name = "aten::mse_loss" if mse else "aten::binary_cross_entropy"
        tape.scope(name, Phase.LOSS)
        loss = tape.new(())
        scalars: Scalars = [("reduction", 1)] if mse else [("weight", None), ("reduction", 1)]
        arguments = [("self", probabilities), ("target", target)]
        op = tape.op(name, arguments, [loss], scalars, module="MSELoss" if mse else "BCELoss")
        tape.scope("aten::detach")
        detached = tape.view(loss, ())
        tape.op("aten::detach", [("self", loss)], [detached])
        tape.scope("aten::to")
        read = tape.new((), device="cpu")
        tape.op("aten::_to_copy", [("self", detached)], [read], _COPY)
        tape.free(read)
        return loss, target, op

    def _backward(self, probabilities: Ref, loss: Ref, target: Ref, loss_op: int) -> None:
        tape, mse = self.tape, self.config.loss == "mse"
        tape.scope("aten::ones_like", Phase.BACKWARD)
        one = tape.new(())
        scalars: Scalars = [("dtype", None), ("memory_format", "preserve_format")]
        tape.op("aten::ones_like", [("self", loss)], [one], scalars)
        tape.scope("MseLossBackward0" if mse else "BinaryCrossEntropyBackward0")
        grad = tape.new((self.batch, 1))
        tape.op(
            "aten::mse_loss_backward" if mse else "aten::binary_cross_entropy_backward",
            [("grad_output", one), ("self", probabilities), ("target", target)], [grad],
            [("reduction", 1)] if mse else [("weight", None), ("reduction", 1)],
            module="MSELoss" if mse else "BCELoss", forward=loss_op,
        )  # fmt: skip
        tape.free(target)
        grad = layers.backward(tape, self.top, grad, input_grad=True)
        dot = self.config.interaction == "dot"
        below = interaction.dot_backward if dot else interaction.concatenate_backward
        to_dense, to_pooled = below(tape, self.interaction, grad)
        tables.update(tape, self.tables, to_pooled)
        tape.free(to_pooled)
        layers.backward(tape, self.bottom, to_dense, input_grad=False)
        tape.free(one)
