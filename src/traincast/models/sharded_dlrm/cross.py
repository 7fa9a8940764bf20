"""A low-rank cross network under DDP, op for op as PyTorch 2 runs it."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.ir.ops import Phase, StorageKind, TensorSpec
from traincast.models.data_parallel.data_parallel import Reducer
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.layers.mlp import (
    write_bias_backward,
    write_operand_backward,
    write_transpose_backward,
    write_weight_backward,
)


@dataclass(slots=True, eq=False)
class _Gemm:
    """A linear layer without bias. What it was given and its ops are set by `write_forward`."""

    weight: Ref
    transposed: Ref | None = None
    operand: Ref | None = None
    ops: tuple[int, int] = (-1, -1)  # t, mm
    casts: tuple[int, int] = (-1, -1)  # of the weight and of what was given, under autocast
    grad: Ref | None = None


@dataclass(slots=True, eq=False)
class _Layer:
    """x <- first * (W V x + b) + x; `shifted` is what is in brackets."""

    narrow: _Gemm
    widen: _Gemm
    bias: Ref
    shifted: Ref | None = None
    ops: tuple[int, int, int] = (-1, -1, -1)  # add of the bias, mul, add of x
    bias_grad: Ref | None = None


class CrossNetwork:
    """Layers of the cross network. Its `reducer` is that of the module under DDP that it is a part of."""

    reducer: Reducer

    def __init__(self, builder: RankBuilder, module: str, width: int, layers: int, rank: int) -> None:
        kind = StorageKind.PARAMETER
        self.builder, self.module = builder, module
        self.layers = [
            _Layer(
                _Gemm(builder.add_resident_tensor((rank, width), kind)),
                _Gemm(builder.add_resident_tensor((width, rank), kind)),
                builder.add_resident_tensor((width,), kind),
            )
            for _ in range(layers)
        ]

    def list_parameters(self) -> list[Ref]:
        """All that narrow, all that widen, all biases."""
        narrow, widen = [layer.narrow.weight for layer in self.layers], [layer.widen.weight for layer in self.layers]
        return [*narrow, *widen, *(layer.bias for layer in self.layers)]

    def list_gradients(self) -> list[Ref]:
        """Their gradients, once backward has run."""
        narrow, widen = [layer.narrow.grad for layer in self.layers], [layer.widen.grad for layer in self.layers]
        return [ref for ref in (*narrow, *widen, *(layer.bias_grad for layer in self.layers)) if ref is not None]

    def list_gradient_specs(self) -> list[TensorSpec]:
        """Shapes of the gradients in the order in which they come."""
        return [
            ref.spec
            for layer in reversed(self.layers)
            for ref in (layer.bias, layer.widen.weight, layer.narrow.weight)
        ]  # fmt: skip

    def leave_autocast(self) -> None:
        """Casts of weights are kept for the backward pass, and biases are not cast."""

    def write_forward(self, first: Ref) -> Ref:
        """[batch, width] to the same."""
        builder, x = self.builder, first
        self.first = first
        crossed: Ref | None = None
        for layer in self.layers:
            wide = self._write_gemm(layer.widen, self._write_gemm(layer.narrow, x))
            if crossed is not None:  # the module's loop still held the one before
                builder.free_tensors(crossed)
            crossed = wide
            add, layer.shifted = self._write_pointwise("add", crossed, layer.bias)
            mul, product = self._write_pointwise("mul", first, layer.shifted)
            before = x
            again, x = self._write_pointwise("add", product, before)
            builder.free_tensors(product, *([before] if builder.half and before is not first else []))
            layer.ops = (add, mul, again)
        if crossed is not None:
            builder.free_tensors(crossed)
        return x

    def write_backward(self, grad: Ref) -> Ref:
        """From the gradient of the result to that of the input, reducing as gradients come."""
        into: Ref | None = None  # gradient of the input so far: every layer adds to it
        for number in reversed(range(len(self.layers))):
            grad, into = self._write_layer_backward(self.layers[number], grad, into, last=number == 0)
        return grad

    def _write_layer_backward(self, layer: _Layer, grad: Ref, into: Ref | None, *, last: bool) -> tuple[Ref, Ref]:
        """Gradients of the layer's x and of the network's input; `last` when they are the same."""
        assert layer.shifted is not None
        builder, (add, mul, again) = self.builder, layer.ops
        builder.open_scope("AddBackward0", Phase.BACKWARD)
        if last:
            into = self._add_gradient(into, grad, again)
        builder.open_scope("MulBackward0")
        _, to_shifted = self._write_pointwise("mul", grad, self.first, forward=mul)
        _, to_first = self._write_pointwise("mul", grad, layer.shifted, forward=mul)
        builder.free_tensors(layer.shifted, *([grad] if last and into is not grad else []))
        if builder.half and last:  # without casts the layer's product still needs it
            builder.free_tensors(self.first)
        into = self._add_gradient(into, to_first, mul, free=True)
        builder.open_scope("AddBackward0")
        to_crossed = to_shifted
        if builder.half:
            to_crossed, _ = builder.add_cast(to_shifted, builder.half, module=self.module, forward=add)
        self._write_bias_backward(layer, to_shifted, add)
        narrow = self._write_gemm_backward(layer.widen, to_crossed)
        self._write_transpose(layer.widen)
        self._accumulate_gradient(layer.widen)
        x_grad = self._write_narrow_backward(layer.narrow, narrow, into if last else grad)
        return x_grad, x_grad if last else into

    def _write_narrow_backward(self, product: _Gemm, grad: Ref, into: Ref | None) -> Ref:
        """The gradient of a layer's x, with what had come of it before; autograd runs the latest op's node first."""
        below = self._write_gemm_backward(product, grad)
        if product.casts[1] < 0:
            result = self._add_gradient(into, below, product.ops[1], free=True)
            self._write_transpose(product)
        else:
            self._write_transpose(product)
            below = self.builder.add_cast_backward(below, product.casts[1], module=self.module)
            result = self._add_gradient(into, below, product.casts[1], free=True)
        self._accumulate_gradient(product)
        return result

    def _write_bias_backward(self, layer: _Layer, grad: Ref, forward: int) -> None:
        bias_grad = write_bias_backward(self.builder, grad, module=self.module, forward=forward)
        if self.builder.half:  # what goes on is cast
            self.builder.free_tensors(grad)
        layer.bias_grad = self.reducer.accumulate_gradient(bias_grad)

    def _write_gemm(self, product: _Gemm, x: Ref) -> Ref:
        builder, weight = self.builder, product.weight
        fan_out, fan_in = weight.shape
        builder.open_scope("aten::linear", Phase.FORWARD)
        weight, weight_cast = builder.add_autocast(weight, self.module)
        x, given_cast = builder.add_autocast(x, self.module)
        product.casts = (weight_cast, given_cast)
        transposed = builder.add_view(weight, (fan_in, fan_out), (1, fan_in))
        t = builder.add_op("aten::t", [("self", weight)], [transposed], module=self.module)
        result = builder.add_tensor((x.shape[0], fan_out), x.spec.dtype)
        mm = builder.add_op("aten::mm", [("self", x), ("mat2", transposed)], [result], module=self.module)
        product.transposed, product.operand, product.ops = transposed, x, (t, mm)
        return result

    def _write_gemm_backward(self, product: _Gemm, grad: Ref) -> Ref:
        """The gradient of what the product was given; that of its weight is kept, still to be accumulated."""
        assert product.transposed is not None and product.operand is not None
        builder, mm = self.builder, product.ops[1]
        builder.open_scope("MmBackward0")
        product.grad = write_weight_backward(builder, grad, product.operand, module=self.module, forward=mm)
        below = write_operand_backward(builder, grad, product.transposed, module=self.module, forward=mm)
        builder.free_tensors(product.operand, grad, *([product.transposed] if product.casts[0] >= 0 else []))
        return below

    def _write_transpose(self, product: _Gemm) -> None:
        assert product.grad is not None
        product.grad = write_transpose_backward(
            self.builder, product.grad, product.weight, module=self.module, forward=product.ops[0]
        )

    def _accumulate_gradient(self, product: _Gemm) -> None:
        assert product.grad is not None
        grad = self.builder.add_cast_backward(product.grad, product.casts[0], module=self.module)
        product.grad = self.reducer.accumulate_gradient(grad)

    def _write_pointwise(self, name: str, one: Ref, other: Ref, *, forward: int = -1) -> tuple[int, Ref]:
        builder, result = self.builder, self.builder.add_tensor(one.shape)
        if forward < 0:
            builder.open_scope(f"aten::{name}")
        scalars: Scalars = [("alpha", 1)] if name == "add" else []
        arguments = [("self", one), ("other", other)]
        op = builder.add_op(f"aten::{name}", arguments, [result], scalars, overload="Tensor", module=self.module,
                     forward=forward)  # fmt: skip
        return op, result

    def _add_gradient(self, into: Ref | None, grad: Ref, forward: int, *, free: bool = False) -> Ref:
        """A gradient that has come, added in place to those before it."""
        if into is None:
            return grad
        arguments = [("self", into), ("other", grad)]
        self.builder.add_op("aten::add_", arguments, [into], [("alpha", 1)], overload="Tensor", module=self.module,
                     forward=forward)  # fmt: skip
        if free:
            self.builder.free_tensors(grad)
        return into
