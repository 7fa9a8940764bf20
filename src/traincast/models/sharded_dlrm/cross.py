"""A low-rank cross network under DDP, op for op as PyTorch 2 runs it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from traincast.ir.ops import Phase, StorageKind, TensorSpec
from traincast.models.data_parallel.reducer import Reducer
from traincast.models.layers.builder import RankBuilder, Ref, Scalars
from traincast.models.layers.mlp import bias_backward


@dataclass(slots=True, eq=False)
class _Product:
    """A linear layer without bias. What it was given and its ops are set by `forward`."""

    weight: Ref
    transposed: Ref | None = None
    operand: Ref | None = None
    ops: tuple[int, int] = (-1, -1)  # t, mm
    casts: tuple[int, int] = (-1, -1)  # of the weight and of what was given, under autocast
    grad: Ref | None = None


@dataclass(slots=True, eq=False)
class _Layer:
    """x <- first * (W V x + b) + x; `shifted` is what is in brackets."""

    narrow: _Product
    widen: _Product
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
                _Product(builder.resident((rank, width), kind)),
                _Product(builder.resident((width, rank), kind)),
                builder.resident((width,), kind),
            )
            for _ in range(layers)
        ]

    def parameters(self) -> list[Ref]:
        """All that narrow, all that widen, all biases."""
        narrow, widen = [layer.narrow.weight for layer in self.layers], [layer.widen.weight for layer in self.layers]
        return [*narrow, *widen, *(layer.bias for layer in self.layers)]

    def grads(self) -> list[Ref]:
        """Their gradients, once backward has run."""
        narrow, widen = [layer.narrow.grad for layer in self.layers], [layer.widen.grad for layer in self.layers]
        return [ref for ref in (*narrow, *widen, *(layer.bias_grad for layer in self.layers)) if ref is not None]

    def arriving(self) -> list[TensorSpec]:
        """Forms of the gradients in the order in which they come."""
        return [
            ref.spec
            for layer in reversed(self.layers)
            for ref in (layer.bias, layer.widen.weight, layer.narrow.weight)
        ]  # fmt: skip

    def leave_autocast(self) -> None:
        """Casts of weights are kept for the backward pass, and biases are not cast."""

    def forward(self, first: Ref) -> Ref:
        """[batch, width] to the same."""
        builder, x = self.builder, first
        self.first = first
        crossed: Ref | None = None
        for layer in self.layers:
            wide = self._product(layer.widen, self._product(layer.narrow, x))
            if crossed is not None:  # the module's loop still held the one before
                builder.free(crossed)
            crossed = wide
            add, layer.shifted = self._pointwise("add", crossed, layer.bias)
            mul, product = self._pointwise("mul", first, layer.shifted)
            before = x
            again, x = self._pointwise("add", product, before)
            builder.free(product, *([before] if builder.half and before is not first else []))
            layer.ops = (add, mul, again)
        if crossed is not None:
            builder.free(crossed)
        return x

    def backward(self, grad: Ref) -> Ref:
        """From the gradient of the result to that of the input, reducing as gradients come."""
        into: Ref | None = None  # gradient of the input so far: every layer adds to it
        for number in reversed(range(len(self.layers))):
            grad, into = self._layer_backward(self.layers[number], grad, into, last=number == 0)
        return grad

    def _layer_backward(self, layer: _Layer, grad: Ref, into: Ref | None, *, last: bool) -> tuple[Ref, Ref]:
        """Gradients of the layer's x and of the network's input; `last` when they are the same."""
        assert layer.shifted is not None
        builder, (add, mul, again) = self.builder, layer.ops
        builder.scope("AddBackward0", Phase.BACKWARD)
        if last:
            into = self._sum(into, grad, again)
        builder.scope("MulBackward0")
        _, to_shifted = self._pointwise("mul", grad, self.first, forward=mul)
        _, to_first = self._pointwise("mul", grad, layer.shifted, forward=mul)
        builder.free(layer.shifted, *([grad] if last and into is not grad else []))
        if builder.half and last:  # without casts the layer's product still needs it
            builder.free(self.first)
        into = self._sum(into, to_first, mul, free=True)
        builder.scope("AddBackward0")
        to_crossed = to_shifted
        if builder.half:
            to_crossed, _ = builder.cast(to_shifted, builder.half, module=self.module, forward=add)
        self._bias_backward(layer, to_shifted, add)
        narrow = self._product_backward(layer.widen, to_crossed)
        self._turn(layer.widen)
        self._accumulate(layer.widen)
        x_grad = self._narrow_backward(layer.narrow, narrow, into if last else grad)
        return x_grad, x_grad if last else into

    def _narrow_backward(self, product: _Product, grad: Ref, into: Ref | None) -> Ref:
        """The gradient of a layer's x, with what had come of it before; autograd runs the latest op's node first."""
        below = self._product_backward(product, grad)
        if product.casts[1] < 0:
            result = self._sum(into, below, product.ops[1], free=True)
            self._turn(product)
        else:
            self._turn(product)
            below = self.builder.cast_backward(below, product.casts[1], module=self.module)
            result = self._sum(into, below, product.casts[1], free=True)
        self._accumulate(product)
        return result

    def _bias_backward(self, layer: _Layer, grad: Ref, forward: int) -> None:
        bias_grad = bias_backward(self.builder, grad, module=self.module, forward=forward)
        if self.builder.half:  # what goes on is cast
            self.builder.free(grad)
        layer.bias_grad = self.reducer.accumulate(bias_grad)

    def _product(self, product: _Product, x: Ref) -> Ref:
        builder, weight = self.builder, product.weight
        fan_out, fan_in = weight.shape
        builder.scope("aten::linear", Phase.FORWARD)
        weight, weight_cast = builder.autocast(weight, self.module)
        x, given_cast = builder.autocast(x, self.module)
        product.casts = (weight_cast, given_cast)
        transposed = builder.view(weight, (fan_in, fan_out), (1, fan_in))
        t = builder.op("aten::t", [("self", weight)], [transposed], module=self.module)
        result = builder.new((x.shape[0], fan_out), x.spec.dtype)
        mm = builder.op("aten::mm", [("self", x), ("mat2", transposed)], [result], module=self.module)
        product.transposed, product.operand, product.ops = transposed, x, (t, mm)
        return result

    def _product_backward(self, product: _Product, grad: Ref) -> Ref:
        """The gradient of what the product was given; that of its weight is kept, still to be accumulated."""
        assert product.transposed is not None and product.operand is not None
        builder, (batch, fan_out), fan_in, dtype = self.builder, grad.shape, product.weight.shape[1], grad.spec.dtype
        op = partial(builder.op, module=self.module, forward=product.ops[1])
        builder.scope("MmBackward0")
        flipped = builder.view(grad, (fan_out, batch), (1, fan_out))
        op("aten::t", [("self", grad)], [flipped])
        weight_grad = builder.new((fan_out, fan_in), dtype)
        op("aten::mm", [("self", flipped), ("mat2", product.operand)], [weight_grad])
        product.grad = builder.view(weight_grad, (fan_in, fan_out), (1, fan_in))
        op("aten::t", [("self", weight_grad)], [product.grad])
        straight = builder.view(product.transposed, (fan_out, fan_in))
        op("aten::t", [("self", product.transposed)], [straight])
        below = builder.new((batch, fan_in), dtype)
        op("aten::mm", [("self", grad), ("mat2", straight)], [below])
        builder.free(product.operand, grad, *([product.transposed] if product.casts[0] >= 0 else []))
        return below

    def _turn(self, product: _Product) -> None:
        assert product.grad is not None
        builder, turned = self.builder, product.grad
        builder.scope("TBackward0")
        product.grad = builder.view(turned, product.weight.shape)
        builder.op("aten::t", [("self", turned)], [product.grad], module=self.module, forward=product.ops[0])

    def _accumulate(self, product: _Product) -> None:
        assert product.grad is not None
        grad = self.builder.cast_backward(product.grad, product.casts[0], module=self.module)
        product.grad = self.reducer.accumulate(grad)

    def _pointwise(self, name: str, one: Ref, other: Ref, *, forward: int = -1) -> tuple[int, Ref]:
        builder, result = self.builder, self.builder.new(one.shape)
        if forward < 0:
            builder.scope(f"aten::{name}")
        scalars: Scalars = [("alpha", 1)] if name == "add" else []
        arguments = [("self", one), ("other", other)]
        op = builder.op(f"aten::{name}", arguments, [result], scalars, overload="Tensor", module=self.module,
                     forward=forward)  # fmt: skip
        return op, result

    def _sum(self, into: Ref | None, grad: Ref, forward: int, *, free: bool = False) -> Ref:
        """A gradient that has come, added in place to those before it."""
        if into is None:
            return grad
        arguments = [("self", into), ("other", grad)]
        self.builder.op("aten::add_", arguments, [into], [("alpha", 1)], overload="Tensor", module=self.module,
                     forward=forward)  # fmt: skip
        if free:
            self.builder.free(grad)
        return into
