"""The dense part of a DLRM on a rank's tape: MLPs, interaction and loss, as facebookresearch/dlrm runs them."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.models.dlrm_interaction import Interaction, dot_products, dot_products_backward
from traincast.models.tape import Ref, Scalars
from traincast.parallel.sharded_config import Dense
from traincast.parallel.sharded_mlp import Mlp
from traincast.parallel.sharded_optimizer import optimizer_step, with_state, zero_grad
from traincast.parallel.sharded_tape import RankTape
from traincast.workload.ops import Phase

MODULE = "Dlrm"


class EagerDense:
    """The parts of one step that every rank runs on its own samples, in the order they run."""

    def __init__(self, tape: RankTape, dense: Dense, columns: int, batch: int) -> None:
        self.tape, self.dense, self.batch = tape, dense, batch
        self.bottom = Mlp(tape, f"{MODULE}.bottom", dense.bottom_mlp, sigmoid_last=False)
        widths = (dense.top_input(columns), *dense.top_mlp)
        self.top = Mlp(tape, f"{MODULE}.top", widths, sigmoid_last=True)
        self.stepped = with_state(tape, dense.optimizer, [*self.bottom.parameters(), *self.top.parameters()])

    def inputs(self) -> None:
        """Dense features and targets, copied from the host."""
        self.tape.scope("aten::to", Phase.INPUT)
        self.features = self.tape.copied_in((self.batch, self.dense.bottom_mlp[0]), "float32")
        self.tape.scope("aten::to", Phase.INPUT)
        self.target = self.tape.copied_in((self.batch, 1), "float32")
        zero_grad(self.tape, self.dense.optimizer)

    def bottom_forward(self) -> None:
        """The bottom MLP."""
        self.x = self.bottom.forward(self.features)

    def top_forward(self, embedded: Sequence[Ref]) -> None:
        """Interaction, top MLP and loss from pooled embeddings [batch, columns]."""
        tape, width = self.tape, self.dense.bottom_mlp[-1]
        self.widths = (width, *(part.shape[1] for part in embedded))
        tape.scope("aten::cat", Phase.FORWARD)
        joined = tape.new((self.batch, sum(self.widths)))
        self.cat_op = tape.op("aten::cat", [("tensors", (self.x, *embedded))], [joined], [("dim", 1)], module=MODULE)
        tape.free(*embedded)
        if self.dense.interaction == "dot":
            tape.scope("aten::view")
            features = tape.view(joined, (self.batch, joined.shape[1] // width, width))
            scalars: Scalars = [("size", (self.batch, -1, width))]
            self.view_op = tape.op("aten::view", [("self", joined)], [features], scalars, module=MODULE)
            self.dot = Interaction(self.x, features, features, self.view_op, self.cat_op)
            joined = dot_products(tape, self.dot, keep=True)
        self.probabilities = self.top.forward(joined)
        self._loss()

    def _loss(self) -> None:
        tape, mse = self.tape, self.dense.loss == "mse"
        if mse:
            tape.scope("aten::broadcast_tensors")
        name = "aten::mse_loss" if mse else "aten::binary_cross_entropy"
        tape.scope(name, Phase.LOSS)
        self.loss = tape.new(())
        scalars: Scalars = [("reduction", 1)] if mse else [("weight", None), ("reduction", 1)]
        arguments = [("self", self.probabilities), ("target", self.target)]
        self.loss_op = tape.op(name, arguments, [self.loss], scalars, module="MSELoss" if mse else "BCELoss")

    def backward_top(self) -> list[Ref]:
        """Back to the pooled embeddings: their gradients, in the order they were given."""
        tape, mse = self.tape, self.dense.loss == "mse"
        tape.scope("aten::ones_like", Phase.BACKWARD)
        one = tape.new(())
        scalars: Scalars = [("dtype", None), ("memory_format", "preserve_format")]
        tape.op("aten::ones_like", [("self", self.loss)], [one], scalars)
        tape.scope("MseLossBackward0" if mse else "BinaryCrossEntropyBackward0")
        grad = tape.new((self.batch, 1))
        tape.op(
            "aten::mse_loss_backward" if mse else "aten::binary_cross_entropy_backward",
            [("grad_output", one), ("self", self.probabilities), ("target", self.target)], [grad],
            [("reduction", 1)] if mse else [("weight", None), ("reduction", 1)],
            module="MSELoss" if mse else "BCELoss", forward=self.loss_op,
        )  # fmt: skip
        grad = self.top.backward(grad, input_grad=True)
        tape.free(one, self.loss, self.target, self.features)
        return self._interaction_backward(grad)

    def _interaction_backward(self, grad: Ref) -> list[Ref]:
        tape = self.tape
        to_x: Ref | None = None
        if self.dense.interaction == "dot":
            to_x, features = dot_products_backward(tape, self.dot, grad, sums_apart=False)
            tape.scope("ViewBackward0")
            grad = tape.view(features, (self.batch, sum(self.widths)))
            size: Scalars = [("size", grad.shape)]
            tape.op("aten::view", [("self", features)], [grad], size, module=MODULE, forward=self.view_op)
        tape.scope("CatBackward0", Phase.BACKWARD)
        pieces, start = [], 0
        for width in self.widths:
            piece = tape.view(grad, (self.batch, width), grad.spec.stride)
            scalars: Scalars = [("dim", 1), ("start", start), ("end", start + width), ("step", 1)]
            tape.op("aten::slice", [("self", grad)], [piece], scalars, overload="Tensor", module=MODULE,
                    forward=self.cat_op)  # fmt: skip
            pieces.append(piece)
            start += width
        self.x_grad = pieces[0]
        if to_x is not None:
            self.x_grad = tape.new(pieces[0].shape)
            arguments = [("self", to_x), ("other", pieces[0])]
            tape.op("aten::add", arguments, [self.x_grad], [("alpha", 1)], overload="Tensor", module=MODULE,
                    forward=self.cat_op)  # fmt: skip
        return pieces[1:]

    def backward_bottom(self) -> None:
        """Back through the bottom MLP."""
        self.bottom.backward(self.x_grad, input_grad=False)

    def finish(self) -> None:
        """What follows the backward pass: reduced gradients come back, and the optimizer steps."""
        self.top.reducer.finish()
        self.bottom.reducer.finish()
        grads = [*self.bottom.grads(), *self.top.grads()]
        optimizer_step(self.tape, self.dense.optimizer, self.stepped, grads)
        self.tape.free(self.probabilities, *grads)
