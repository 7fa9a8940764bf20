"""The loss of click probabilities, and the start of the backward pass from it."""

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
    "logits": Loss(
        "aten::binary_cross_entropy_with_logits", "", "BinaryCrossEntropyWithLogitsBackward0", "",
        (("weight", None), ("pos_weight", None), ("reduction", 1)),
    ),
}  # fmt: skip


def write_loss_forward(builder: StepBuilder, kind: str, probabilities: Ref, target: Ref) -> tuple[Ref, int]:
    """The mean loss, and its op."""
    loss = LOSSES[kind]
    if kind == "mse":
        builder.open_scope("aten::broadcast_tensors")
    builder.open_scope(loss.forward, Phase.LOSS)
    mean = builder.add_tensor(())
    arguments = [("self", probabilities), ("target", target)]
    return mean, builder.add_op(loss.forward, arguments, [mean], loss.scalars, module=loss.module)


def write_backward_start(builder: StepBuilder, mean: Ref) -> Ref:
    """The gradient that a backward pass begins with: one."""
    builder.open_scope("aten::ones_like", Phase.BACKWARD)
    one = builder.add_tensor(())
    scalars: Scalars = [("dtype", None), ("memory_format", "preserve_format")]
    builder.add_op("aten::ones_like", [("self", mean)], [one], scalars)
    return one


def write_loss_backward(
    builder: StepBuilder, kind: str, one: Ref, probabilities: Ref, target: Ref, *, forward: int
) -> Ref:
    """The gradient of the probabilities or logits; `forward` is the loss's op."""
    loss, shape = LOSSES[kind], probabilities.shape
    builder.open_scope(loss.node)
    if loss.backward:
        arguments = [("grad_output", one), ("self", probabilities), ("target", target)]
        return builder.compute(loss.backward, arguments, shape, loss.scalars, module=loss.module, forward=forward)
    likely = builder.compute("aten::sigmoid", [("self", probabilities)], shape, forward=forward)
    missed = builder.compute(
        "aten::sub", [("self", likely), ("other", target)], shape, [("alpha", 1)], overload="Tensor", forward=forward
    )
    builder.free_tensors(likely)
    grad = builder.compute("aten::mul", [("self", missed), ("other", one)], shape, overload="Tensor", forward=forward)
    builder.free_tensors(missed)
    mean: Scalars = [("other", probabilities.spec.numel)]
    builder.add_op("aten::div_", [("self", grad)], [grad], mean, overload="Scalar", forward=forward)
    return grad
