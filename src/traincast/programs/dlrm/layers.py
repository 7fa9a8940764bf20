"""The linear layers of a DLRM on a tape: forward, backward and optimizer, op for op as PyTorch runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from traincast.programs.tape import Ref, Scalars, Tape
from traincast.workload.ops import Phase, StorageKind

LEARNING_RATE = 0.01
_ACTIVATION_BACKWARD: dict[str, tuple[str, str, str, Scalars]] = {
    "sigmoid": ("SigmoidBackward0", "aten::sigmoid_backward", "output", ()),
    "relu": ("ReluBackward0", "aten::threshold_backward", "self", (("threshold", 0),)),
}


@dataclass(slots=True)
class Layer:
    """A linear layer and its activation (`relu`, `sigmoid`, "" for none). Ops are indices of the program, set by
    `forward`."""

    weight: Ref
    bias: Ref
    weight_grad: Ref | None
    bias_grad: Ref | None
    module: str  # of the linear layer; the activation's is one further
    activation_module: str
    activation: str
    transposed: Ref | None = None
    given: Ref | None = None
    result: Ref | None = None
    ops: tuple[int, int, int] = (-1, -1, -1)  # t, addmm, activation
    casts: tuple[int, int, int] = (-1, -1, -1)  # of bias, weight and input under autocast
    cast_bias: Ref | None = None


def layers(tape: Tape, name: str, widths: Sequence[int], *, last: str = "relu", gradients: bool = False) -> list[Layer]:
    """The parameters of an MLP whose last activation is `last`; with `gradients` those of the step before are there."""
    pairs = list(zip(widths, widths[1:], strict=False))
    return [
        Layer(
            weight=tape.resident((fan_out, fan_in), StorageKind.PARAMETER),
            bias=tape.resident((fan_out,), StorageKind.PARAMETER),
            weight_grad=tape.resident((fan_out, fan_in), StorageKind.GRADIENT) if gradients else None,
            bias_grad=tape.resident((fan_out,), StorageKind.GRADIENT) if gradients else None,
            module=f"{name}.{2 * i}",
            activation_module=f"{name}.{2 * i + 1}",
            activation=last if i == len(pairs) - 1 else "relu",
        )
        for i, (fan_in, fan_out) in enumerate(pairs)
    ]


def forward(tape: Tape, mlp: Sequence[Layer], x: Ref, *, keep: bool) -> Ref:
    """Runs an MLP; with `keep` (training) every activation's result is kept for the backward pass."""
    for number, layer in enumerate(mlp):
        fan_out, fan_in = layer.weight.shape
        tape.scope("aten::linear", Phase.FORWARD)
        operands = [tape.autocast(each, layer.module) for each in (layer.bias, layer.weight, x)]
        (bias, bias_cast), (weight, weight_cast), (given, given_cast) = operands
        layer.casts, layer.cast_bias = (bias_cast, weight_cast, given_cast), bias if bias_cast >= 0 else None
        transposed = tape.view(weight, (fan_in, fan_out), (1, fan_in))
        t = tape.op("aten::t", [("self", weight)], [transposed], module=layer.module)
        linear = tape.new((x.shape[0], fan_out), weight.spec.dtype)
        addmm = tape.op(
            "aten::addmm", [("self", bias), ("mat1", given), ("mat2", transposed)], [linear],
            [("beta", 1), ("alpha", 1)], module=layer.module,
        )  # fmt: skip
        if not keep and number:
            tape.free(x)
        layer.transposed, layer.given = transposed, given
        activation, x = _activation(tape, layer, linear) if layer.activation else (-1, linear)
        layer.result, layer.ops = x, (t, addmm, activation)
    return x


def _activation(tape: Tape, layer: Layer, linear: Ref) -> tuple[int, Ref]:
    name = f"aten::{layer.activation}"
    tape.scope(name)
    result = tape.new(linear.shape, linear.spec.dtype)
    op = tape.op(name, [("self", linear)], [result], module=layer.activation_module)
    tape.free(linear)
    return op, result


def backward(tape: Tape, mlp: Sequence[Layer], grad: Ref, *, input_grad: bool) -> Ref:
    """The backward pass of an MLP from the gradient of its result; gives the gradient of its input."""
    for number in reversed(range(len(mlp))):
        layer = mlp[number]
        assert layer.result is not None
        inner = activation_backward(tape, layer, grad, layer.result)
        if layer.activation == "relu":  # the sigmoid's result is still held by the training loop
            tape.free(layer.result)
        grad = _linear_backward(tape, layer, inner, first=not number, input_grad=input_grad or number > 0)
    return grad


def activation_backward(tape: Tape, layer: Layer, grad: Ref, result: Ref) -> Ref:
    """The gradient of what the activation was given; `result` is what it gave."""
    node, name, saved, scalars = _ACTIVATION_BACKWARD[layer.activation]
    tape.scope(node, Phase.BACKWARD)
    inner = tape.new(grad.shape, grad.spec.dtype)
    arguments = [("grad_output", grad), (saved, result)]
    tape.op(name, arguments, [inner], scalars, module=layer.activation_module, forward=layer.ops[2])
    tape.free(grad)
    return inner


def products_backward(
    tape: Tape,
    op: Callable[..., int],
    transposed: Ref,
    given: Ref,
    grad: Ref,
    *,
    input_grad: bool,
) -> tuple[Ref, Ref, Ref]:
    """The products of a linear layer's backward: gradients of its input (`grad` when not wanted) and of its weight,
    and the latter transposed."""
    (batch, fan_out), fan_in, dtype = grad.shape, transposed.shape[0], grad.spec.dtype
    below = grad
    if input_grad:
        straight = tape.view(transposed, (fan_out, fan_in))
        op("aten::t", [("self", transposed)], [straight])
        below = tape.new((batch, fan_in), dtype)
        op("aten::mm", [("self", grad), ("mat2", straight)], [below])
    flipped = tape.view(grad, (fan_out, batch), (1, fan_out))
    op("aten::t", [("self", grad)], [flipped])
    weight_grad = tape.new((fan_out, fan_in), dtype)
    op("aten::mm", [("self", flipped), ("mat2", given)], [weight_grad])
    turned = tape.view(weight_grad, (fan_in, fan_out), (1, fan_in))
    op("aten::t", [("self", weight_grad)], [turned])
    return below, weight_grad, turned


def _linear_backward(tape: Tape, layer: Layer, grad: Ref, *, first: bool, input_grad: bool) -> Ref:
    assert layer.transposed is not None and layer.given is not None
    assert layer.weight_grad is not None and layer.bias_grad is not None
    t, addmm, _ = layer.ops
    fan_out, fan_in = layer.weight.shape
    op = partial(tape.op, module=layer.module, forward=addmm)
    tape.scope("AddmmBackward0")
    below, weight_grad, turned = products_backward(tape, op, layer.transposed, layer.given, grad, input_grad=input_grad)
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
