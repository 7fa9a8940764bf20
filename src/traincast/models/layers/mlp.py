"""Linear layers and the loss of click probabilities, forward and backward, op for op as PyTorch runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.ir.ops import ACCUMULATE_GRAD, Phase, StorageKind, TensorSpec
from traincast.models.data_parallel.data_parallel import Reducer
from traincast.models.layers.builder import Ref, Scalars, StepBuilder

_ACTIVATION_BACKWARD: dict[str, tuple[str, str, str, Scalars]] = {
    "sigmoid": ("SigmoidBackward0", "aten::sigmoid_backward", "output", ()),
    "relu": ("ReluBackward0", "aten::threshold_backward", "self", (("threshold", 0),)),
}


@dataclass(slots=True)
class Layer:
    """A linear layer and its activation (`relu`, `sigmoid`, "" for none). Ops are indices of the program, set by
    `write_forward`."""

    weight: Ref
    bias: Ref
    weight_grad: Ref | None
    bias_grad: Ref | None
    module: str  # of the linear layer; the activation's is one further
    activation_module: str
    activation: str
    transposed: Ref | None = None
    operand: Ref | None = None  # what the weight was multiplied with
    result: Ref | None = None
    ops: tuple[int, int, int] = (-1, -1, -1)  # t, addmm, activation
    casts: tuple[int, int, int] = (-1, -1, -1)  # of bias, weight and input under autocast
    cast_bias: Ref | None = None


def write_forward(builder: StepBuilder, layers: Sequence[Layer], x: Ref, *, keep: bool) -> Ref:
    """Runs layers; with `keep` (training) every activation's result is kept for the backward pass."""
    for number, layer in enumerate(layers):
        fan_out, fan_in = layer.weight.shape
        builder.open_scope("aten::linear", Phase.FORWARD)
        operands = [builder.add_autocast(ref, layer.module) for ref in (layer.bias, layer.weight, x)]
        (bias, bias_cast), (weight, weight_cast), (operand, operand_cast) = operands
        layer.casts, layer.cast_bias = (bias_cast, weight_cast, operand_cast), bias if bias_cast >= 0 else None
        transposed = builder.add_view(weight, (fan_in, fan_out), (1, fan_in))
        t = builder.add_op("aten::t", [("self", weight)], [transposed], module=layer.module)
        linear = builder.add_tensor((x.shape[0], fan_out), weight.spec.dtype)
        addmm = builder.add_op(
            "aten::addmm", [("self", bias), ("mat1", operand), ("mat2", transposed)], [linear],
            [("beta", 1), ("alpha", 1)], module=layer.module,
        )  # fmt: skip
        if not keep and number:
            builder.free_tensors(x)
        layer.transposed, layer.operand = transposed, operand
        activation, x = _write_activation(builder, layer, linear) if layer.activation else (-1, linear)
        layer.result, layer.ops = x, (t, addmm, activation)
    return x


def _write_activation(builder: StepBuilder, layer: Layer, linear: Ref) -> tuple[int, Ref]:
    name = f"aten::{layer.activation}"
    builder.open_scope(name)
    result = builder.add_tensor(linear.shape, linear.spec.dtype)
    op = builder.add_op(name, [("self", linear)], [result], module=layer.activation_module)
    builder.free_tensors(linear)
    return op, result


def write_bias_backward(builder: StepBuilder, grad: Ref, *, module: str = "", forward: int = -1) -> Ref:
    """The gradient of a bias from that of what it was added to: summed over samples by the engine itself."""
    width = grad.shape[1]
    builder.open_engine_op_scope("aten::sum")
    scalars: Scalars = [("dim", (0,)), ("keepdim", True), ("dtype", None)]
    summed = builder.compute(
        "aten::sum", [("self", grad)], (1, width), scalars, dtype=grad.spec.dtype, overload="dim_IntList",
        module=module, forward=forward,
    )  # fmt: skip
    builder.open_engine_op_scope("aten::view")
    bias_grad = builder.add_view(summed, (width,))
    builder.add_op("aten::view", [("self", summed)], [bias_grad], [("size", (width,))], module=module, forward=forward)
    return bias_grad


def write_operand_backward(builder: StepBuilder, grad: Ref, turned: Ref, *, module: str = "", forward: int = -1) -> Ref:
    """The gradient of what was multiplied with a transposed weight, from that of the product."""
    straight = builder.add_view(turned, turned.shape[::-1])
    builder.add_op("aten::t", [("self", turned)], [straight], module=module, forward=forward)
    return builder.compute(
        "aten::mm", [("self", grad), ("mat2", straight)], (grad.shape[0], turned.shape[0]), dtype=grad.spec.dtype,
        module=module, forward=forward,
    )  # fmt: skip


def write_weight_backward(builder: StepBuilder, grad: Ref, operand: Ref, *, module: str = "", forward: int = -1) -> Ref:
    """The gradient of the weight that `operand` was multiplied with, transposed as the weight was."""
    (rows, width), inner = grad.shape, operand.shape[1]
    flipped = builder.add_view(grad, (width, rows), (1, width))
    builder.add_op("aten::t", [("self", grad)], [flipped], module=module, forward=forward)
    product = builder.compute(
        "aten::mm", [("self", flipped), ("mat2", operand)], (width, inner), dtype=grad.spec.dtype, module=module,
        forward=forward,
    )  # fmt: skip
    turned = builder.add_view(product, (inner, width), (1, inner))
    builder.add_op("aten::t", [("self", product)], [turned], module=module, forward=forward)
    return turned


def write_transpose_backward(
    builder: StepBuilder, turned: Ref, weight: Ref, *, module: str = "", forward: int = -1
) -> Ref:
    """The gradient of a weight from that of its transpose."""
    builder.open_scope("TBackward0")
    grad = builder.add_view(turned, weight.shape)
    builder.add_op("aten::t", [("self", turned)], [grad], module=module, forward=forward)
    return grad


class Mlp:
    """An MLP whose last activation is `last`; with `input_grad` backward goes on to what is below.

    Its `reducer` is that of the module under DDP that it is a part of. Without one gradients are added to those of
    the step before, which are there with `gradients`.
    """

    reducer: Reducer | None = None

    def __init__(
        self,
        builder: StepBuilder,
        name: str,
        widths: Sequence[int],
        *,
        last: str = "relu",
        input_grad: bool,
        gradients: bool = False,
    ) -> None:
        self.builder, self.input_grad = builder, input_grad
        pairs = list(zip(widths, widths[1:], strict=False))
        self.layers = [
            Layer(
                weight=builder.add_resident_tensor((fan_out, fan_in), StorageKind.PARAMETER),
                bias=builder.add_resident_tensor((fan_out,), StorageKind.PARAMETER),
                weight_grad=builder.add_resident_tensor((fan_out, fan_in), StorageKind.GRADIENT) if gradients else None,
                bias_grad=builder.add_resident_tensor((fan_out,), StorageKind.GRADIENT) if gradients else None,
                module=f"{name}.{2 * i}",
                activation_module=f"{name}.{2 * i + 1}",
                activation=last if i == len(pairs) - 1 else "relu",
            )
            for i, (fan_in, fan_out) in enumerate(pairs)
        ]

    def list_parameters(self) -> list[Ref]:
        """Weights and biases in order."""
        return [ref for layer in self.layers for ref in (layer.weight, layer.bias)]

    def list_gradients(self) -> list[Ref]:
        """Their gradients: those of the step before, or once backward has run."""
        return [ref for layer in self.layers for ref in (layer.weight_grad, layer.bias_grad) if ref is not None]

    def list_gradient_specs(self) -> list[TensorSpec]:
        """Shapes of the gradients in the order in which they come; those that are cast, last cast first."""
        pairs = [(layer.bias, layer.weight) for layer in reversed(self.layers)]
        return [ref.spec for pair in pairs for ref in (reversed(pair) if self.builder.half else pair)]

    def leave_autocast(self) -> None:
        """Lets go of casts that only autocast's cache still holds: biases, and a weight that passes no gradient on."""
        held = [layer.cast_bias for layer in self.layers]
        first = self.layers[0]
        if not self.input_grad and first.casts[1] >= 0:
            held.append(first.transposed)
        self.builder.free_tensors(*(ref for ref in held if ref is not None))

    def write_forward(self, x: Ref, *, keep: bool = True) -> Ref:
        """Runs the layers; with `keep` (training) results are kept for the backward pass."""
        return write_forward(self.builder, self.layers, x, keep=keep)

    def write_backward(self, grad: Ref) -> Ref:
        """From the gradient of the result to that of the input (if wanted), accumulating gradients as they come."""
        first = self.layers[0]
        for layer in reversed(self.layers):
            inner = self._write_activation_backward(layer, grad) if layer.activation else grad
            grad = self._write_linear_backward(layer, inner, input_grad=self.input_grad or layer is not first)
        return grad

    def _write_activation_backward(self, layer: Layer, grad: Ref) -> Ref:
        """The gradient of what the activation was given."""
        assert layer.result is not None
        builder, (node, name, saved, scalars) = self.builder, _ACTIVATION_BACKWARD[layer.activation]
        builder.open_scope(node, Phase.BACKWARD)
        inner = builder.add_tensor(grad.shape, grad.spec.dtype)
        arguments = [("grad_output", grad), (saved, builder.add_view(layer.result, layer.result.shape))]
        builder.add_op(name, arguments, [inner], scalars, module=layer.activation_module, forward=layer.ops[2])
        builder.free_tensors(grad, layer.result)
        return inner

    def _write_linear_backward(self, layer: Layer, grad: Ref, *, input_grad: bool) -> Ref:
        assert layer.transposed is not None and layer.operand is not None
        builder, t, addmm = self.builder, layer.ops[0], layer.ops[1]
        bias_cast, weight_cast, operand_cast = layer.casts
        builder.open_scope("AddmmBackward0", Phase.BACKWARD)
        below = (
            write_operand_backward(builder, grad, layer.transposed, module=layer.module, forward=addmm)
            if input_grad
            else grad
        )
        turned = write_weight_backward(builder, grad, layer.operand, module=layer.module, forward=addmm)
        bias_grad = write_bias_backward(builder, grad, module=layer.module, forward=addmm)
        builder.free_tensors(grad, layer.operand)
        if weight_cast < 0:
            layer.bias_grad = self._accumulate_gradient(layer.bias_grad, bias_grad)
        elif input_grad:
            builder.free_tensors(layer.transposed)
        weight_grad = write_transpose_backward(builder, turned, layer.weight, module=layer.module, forward=t)
        if input_grad:
            below = builder.add_cast_backward(below, operand_cast, module=layer.module)
        weight_grad = builder.add_cast_backward(weight_grad, weight_cast, module=layer.module)
        layer.weight_grad = self._accumulate_gradient(layer.weight_grad, weight_grad)
        if weight_cast >= 0:
            bias_grad = builder.add_cast_backward(bias_grad, bias_cast, module=layer.module)
            layer.bias_grad = self._accumulate_gradient(layer.bias_grad, bias_grad)
        return below

    def _accumulate_gradient(self, before: Ref | None, grad: Ref) -> Ref:
        """The gradient that the optimizer will read, once `grad` has come; `before` is that of the step before."""
        if self.reducer is not None:
            return self.reducer.accumulate_gradient(grad)
        assert before is not None
        builder = self.builder
        builder.open_scope(ACCUMULATE_GRAD)
        builder.add_op("aten::add_", [("self", before), ("other", grad)], [before], [("alpha", 1)], overload="Tensor")
        builder.free_tensors(grad)
        return before


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
