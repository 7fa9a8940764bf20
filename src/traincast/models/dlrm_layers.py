"""The linear layers of a DLRM on a tape: forward, backward and optimizer, op for op as PyTorch runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from traincast.models.tape import Ref, Scalars, Tape
from traincast.workload.ops import Phase, StorageKind

LEARNING_RATE = 0.01


@dataclass(slots=True)
class Layer:
    """A linear layer and its activation. Ops are indices of the program, set by `forward`."""

    weight: Ref
    bias: Ref
    weight_grad: Ref | None
    bias_grad: Ref | None
    module: str  # of the linear layer; the activation's is one further
    activation_module: str
    sigmoid: bool
    transposed: Ref | None = None
    given: Ref | None = None
    result: Ref | None = None
    ops: tuple[int, int, int] = (-1, -1, -1)  # t, addmm, activation


def layers(tape: Tape, name: str, widths: Sequence[int], *, sigmoid_last: bool, gradients: bool) -> list[Layer]:
    """The parameters of an MLP, with gradients from the step before when training."""
    pairs = list(zip(widths, widths[1:], strict=False))
    return [
        Layer(
            weight=tape.resident((fan_out, fan_in), StorageKind.PARAMETER),
            bias=tape.resident((fan_out,), StorageKind.PARAMETER),
            weight_grad=tape.resident((fan_out, fan_in), StorageKind.GRADIENT) if gradients else None,
            bias_grad=tape.resident((fan_out,), StorageKind.GRADIENT) if gradients else None,
            module=f"{name}.{2 * i}",
            activation_module=f"{name}.{2 * i + 1}",
            sigmoid=sigmoid_last and i == len(pairs) - 1,
        )
        for i, (fan_in, fan_out) in enumerate(pairs)
    ]


def forward(tape: Tape, mlp: Sequence[Layer], x: Ref, *, keep: bool) -> Ref:
    """Runs an MLP; with `keep` (training) every activation's result is kept for the backward pass."""
    for number, layer in enumerate(mlp):
        fan_out, fan_in = layer.weight.shape
        tape.scope("aten::linear", Phase.FORWARD)
        transposed = tape.view(layer.weight, (fan_in, fan_out), (1, fan_in))
        t = tape.op("aten::t", [("self", layer.weight)], [transposed], module=layer.module)
        linear = tape.new((x.shape[0], fan_out))
        addmm = tape.op(
            "aten::addmm", [("self", layer.bias), ("mat1", x), ("mat2", transposed)], [linear],
            [("beta", 1), ("alpha", 1)], module=layer.module,
        )  # fmt: skip
        if not keep and number:
            tape.free(x)
        kind = "aten::sigmoid" if layer.sigmoid else "aten::relu"
        tape.scope(kind)
        result = tape.new(linear.shape)
        activation = tape.op(kind, [("self", linear)], [result], module=layer.activation_module)
        tape.free(linear)
        layer.transposed, layer.given, layer.result = transposed, x, result
        layer.ops = (t, addmm, activation)
        x = result
    return x


def backward(tape: Tape, mlp: Sequence[Layer], grad: Ref, *, input_grad: bool) -> Ref:
    """The backward pass of an MLP from the gradient of its result; gives the gradient of its input."""
    for number in reversed(range(len(mlp))):
        layer = mlp[number]
        assert layer.result is not None
        t, addmm, activation = layer.ops
        node, name, saved = (
            ("SigmoidBackward0", "aten::sigmoid_backward", "output")
            if layer.sigmoid
            else ("ReluBackward0", "aten::threshold_backward", "self")
        )
        tape.scope(node, Phase.BACKWARD)
        inner = tape.new(grad.shape)
        tape.op(
            name, [("grad_output", grad), (saved, layer.result)], [inner],
            () if layer.sigmoid else [("threshold", 0)], module=layer.activation_module, forward=activation,
        )  # fmt: skip
        tape.free(grad)
        if not layer.sigmoid:  # the sigmoid's result is still held by the training loop
            tape.free(layer.result)
        grad = _linear_backward(tape, layer, inner, t, addmm, first=not number, input_grad=input_grad or number > 0)
    return grad


def products_backward(
    tape: Tape,
    op: Callable[..., int],
    weight: Ref,
    transposed: Ref,
    given: Ref,
    grad: Ref,
    *,
    input_grad: bool,
) -> tuple[Ref, Ref, Ref]:
    """The products of a linear layer's backward: gradients of its input (`grad` when not wanted) and of its weight,
    and the latter transposed."""
    (batch, fan_out), fan_in = grad.shape, weight.shape[1]
    below = grad
    if input_grad:
        straight = tape.view(weight, (fan_out, fan_in))
        op("aten::t", [("self", transposed)], [straight])
        below = tape.new((batch, fan_in))
        op("aten::mm", [("self", grad), ("mat2", straight)], [below])
    flipped = tape.view(grad, (fan_out, batch), (1, fan_out))
    op("aten::t", [("self", grad)], [flipped])
    weight_grad = tape.new((fan_out, fan_in))
    op("aten::mm", [("self", flipped), ("mat2", given)], [weight_grad])
    turned = tape.view(weight_grad, (fan_in, fan_out), (1, fan_in))
    op("aten::t", [("self", weight_grad)], [turned])
    return below, weight_grad, turned


def _linear_backward(tape: Tape, layer: Layer, grad: Ref, t: int, addmm: int, *, first: bool, input_grad: bool) -> Ref:
    assert layer.transposed is not None and layer.given is not None
    assert layer.weight_grad is not None and layer.bias_grad is not None
    fan_out, fan_in = layer.weight.shape
    op = partial(tape.op, module=layer.module, forward=addmm)
    tape.scope("AddmmBackward0")
    below, weight_grad, turned = products_backward(
        tape, op, layer.weight, layer.transposed, layer.given, grad, input_grad=input_grad
    )
    tape.scope("aten::sum")
    summed = tape.new((1, fan_out))
    scalars: Scalars = [("dim", (0,)), ("keepdim", True), ("dtype", None)]
    op("aten::sum", [("self", grad)], [summed], scalars, overload="dim_IntList")
    tape.scope("aten::view")
    bias_grad = tape.view(summed, (fan_out,))
    op("aten::view", [("self", summed)], [bias_grad], [("size", (fan_out,))])
    tape.free(grad)
    if first:  # other layers read the result of an activation, which its own backward still needs
        tape.free(layer.given)
    _accumulate(tape, layer.bias_grad, bias_grad)
    tape.scope("TBackward0")
    straight = tape.view(weight_grad, (fan_out, fan_in))
    tape.op("aten::t", [("self", turned)], [straight], module=layer.module, forward=t)
    _accumulate(tape, layer.weight_grad, straight)
    return below


def _accumulate(tape: Tape, into: Ref, grad: Ref) -> None:
    tape.scope("torch::autograd::AccumulateGrad")
    tape.op("aten::add_", [("self", into), ("other", grad)], [into], [("alpha", 1)], overload="Tensor")
    tape.free(grad)
