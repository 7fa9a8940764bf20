"""The loss of click probabilities on a tape, and the start of the backward pass from it."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.ir.ops import Phase
from traincast.models.layers.builder import Ref, Scalars, StepBuilder


@dataclass(frozen=True, slots=True)
class Loss:
    """Names of a loss in PyTorch."""

    forward: str
    backward: str
    node: str
    module: str
    scalars: Scalars


LOSSES = {
    "mse": Loss("aten::mse_loss", "aten::mse_loss_backward", "MseLossBackward0", "MSELoss", (("reduction", 1),)),
    "bce": Loss(
        "aten::binary_cross_entropy", "aten::binary_cross_entropy_backward", "BinaryCrossEntropyBackward0", "BCELoss",
        (("weight", None), ("reduction", 1)),
    ),
}  # fmt: skip


def loss_forward(tape: StepBuilder, kind: str, probabilities: Ref, target: Ref) -> tuple[Ref, int]:
    """The mean loss, and its op."""
    loss = LOSSES[kind]
    if kind == "mse":
        tape.scope("aten::broadcast_tensors")
    tape.scope(loss.forward, Phase.LOSS)
    mean = tape.new(())
    arguments = [("self", probabilities), ("target", target)]
    return mean, tape.op(loss.forward, arguments, [mean], loss.scalars, module=loss.module)


def begin_backward(tape: StepBuilder, mean: Ref) -> Ref:
    """The gradient that a backward pass begins with: one."""
    tape.scope("aten::ones_like", Phase.BACKWARD)
    one = tape.new(())
    scalars: Scalars = [("dtype", None), ("memory_format", "preserve_format")]
    tape.op("aten::ones_like", [("self", mean)], [one], scalars)
    return one


def loss_backward(tape: StepBuilder, kind: str, one: Ref, probabilities: Ref, target: Ref, *, forward: int) -> Ref:
    """The gradient of the probabilities; `forward` is the loss's op."""
    loss = LOSSES[kind]
    tape.scope(loss.node)
    grad = tape.new(probabilities.shape)
    arguments = [("grad_output", one), ("self", probabilities), ("target", target)]
    tape.op(loss.backward, arguments, [grad], loss.scalars, module=loss.module, forward=forward)
    return grad
