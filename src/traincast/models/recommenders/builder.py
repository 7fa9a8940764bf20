"""Ops written forward and noted, from which the backward pass is written: autograd's order, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from traincast.ir.ops import ACCUMULATE_GRAD, EFFECTIVE_LENGTH, POINTWISE, POINTWISE_BACKWARD, Phase, StorageKind
from traincast.models.embeddings.access import format_access
from traincast.models.embeddings.table import Table
from traincast.models.layers.builder import Arguments, Ref, Scalars, StepBuilder
from traincast.models.layers.mlp import (
    write_backward_start,
    write_bias_backward,
    write_loss_backward,
    write_loss_forward,
    write_operand_backward,
    write_transpose_backward,
    write_weight_backward,
)
from traincast.models.recommenders.storage import DEVICE, Storage, write_lookup

Grads = Sequence[Ref | None]


@dataclass(frozen=True, slots=True)
class _Node:
    """A step of backward: its name, the results whose gradients it takes, and how it writes those of its inputs."""

    title: str
    results: tuple[Ref, ...]
    inputs: tuple[Ref, ...]
    write: Callable[..., Grads]


class RecommenderBuilder(StepBuilder):
    """The step of one model: `parameters` in the order they are made, and their gradients once `write_backward` ran."""

    def __init__(self, batch_size: int, storages: Mapping[str, Storage]) -> None:
        super().__init__(batch_size)
        self._storages = storages  # of tables that are not simply on the device
        self._at_backward: list[Callable[[], None]] = []
        self.parameters: list[Ref] = []
        self.gradients: dict[int, Ref] = {}
        self.tables: list[tuple[Table, ...]] = []  # of each lookup
        self._nodes: list[_Node] = []
        self._wanted: set[int] = set()  # tensors that have a gradient

    def make_parameter(self, *shape: int) -> Ref:
        """A weight, there before the step."""
        made = self.add_resident_tensor(shape, StorageKind.PARAMETER)
        self.parameters.append(made)
        self._wanted.add(made.tensor)
        return made

    def make_input(self, *shape: int, dtype: str = "float32") -> Ref:
        """A tensor of the batch, on the device before the step."""
        return self.add_resident_tensor(shape, StorageKind.INPUT, dtype)

    # ---- what models are made of

    def apply_linear(self, x: Ref, width: int, *, bias: bool = True) -> Ref:
        """`nn.Linear` over the last dimension."""
        flat = x
        weight = self.make_parameter(width, x.shape[-1])
        shift = self.make_parameter(width) if bias else None
        self.open_scope("aten::linear", Phase.FORWARD)
        if len(x.shape) > 2:
            flat = self._note_view(self._view(x, (prod(x.shape[:-1]), x.shape[-1])), x)
        turned = self.add_view(weight, (x.shape[-1], width), (1, x.shape[-1]))
        self.add_op("aten::t", [("self", weight)], [turned])
        result = self.add_tensor((flat.shape[0], width))
        products: Arguments = [("mat1", flat), ("mat2", turned)]
        if shift is None:
            self.add_op("aten::mm", [("self", flat), ("mat2", turned)], [result])
        else:
            self.add_op("aten::addmm", [("self", shift), *products], [result], [("beta", 1), ("alpha", 1)])
        whole = result if flat is x else self._view(result, (*x.shape[:-1], width))

        def write(grad: Ref) -> Grads:
            below = write_operand_backward(self, grad, turned) if x.tensor in self._wanted else None
            turned_grad = write_weight_backward(self, grad, flat)
            if shift is not None:
                self._accumulate(shift, write_bias_backward(self, grad))
            self._accumulate(weight, write_transpose_backward(self, turned_grad, weight))
            return [below]

        self._note("AddmmBackward0" if bias else "MmBackward0", result, (flat, weight), write)
        return whole if flat is x else self._note_view(whole, result)

    def apply_mlp(self, x: Ref, widths: Sequence[int], *, activation: str = "relu") -> Ref:
        """Linear layers, each with its activation."""
        for width in widths:
            x = self.apply_unary(activation, self.apply_linear(x, width))
        return x

    def apply_unary(self, name: str, x: Ref) -> Ref:
        """relu, silu, gelu or sigmoid."""
        backward, saves_result, scalars = _UNARY[name]
        forward_scalars: Scalars = [("approximate", "none")] if name == "gelu" else []
        result = self._make(f"aten::{name}", [("self", x)], x.shape, forward_scalars)

        def write(grad: Ref) -> Grads:
            arguments = [
                ("grad_output", grad),
                ("self" if not saves_result else "result", result if saves_result else x),
            ]
            return [self.compute(f"aten::{backward}", arguments, x.shape, scalars)]

        return self._note(f"{name.title()}Backward0", result, (x,), write)

    def multiply(self, x: Ref, y: Ref) -> Ref:
        """Element by element; the second may be broadcast."""
        result = self._make("aten::mul", [("self", x), ("other", y)], _broadcast(x, y), overload="Tensor")

        def write(grad: Ref) -> Grads:
            made: list[Ref | None] = []
            for one, other in ((x, y), (y, x)):
                if one.tensor not in self._wanted:
                    made.append(None)
                    continue
                product = self.compute("aten::mul", [("self", grad), ("other", other)], grad.shape, overload="Tensor")
                made.append(self._sum_to(product, one.shape))
            return made

        return self._note("MulBackward0", result, (x, y), write)

    def scale(self, x: Ref, by: float) -> Ref:
        """Times a number."""
        result = self._make("aten::mul", [("self", x)], x.shape, [("other", by)], overload="Tensor")
        return self._note("MulBackward0", result, (x,), lambda grad: [
            self.compute("aten::mul", [("self", grad)], x.shape, [("other", by)], overload="Tensor")
        ])  # fmt: skip

    def add(self, x: Ref, y: Ref) -> Ref:
        """Element by element; the second may be broadcast."""
        result = self._make(
            "aten::add", [("self", x), ("other", y)], _broadcast(x, y), [("alpha", 1)], overload="Tensor"
        )
        return self._note("AddBackward0", result, (x, y), lambda grad: [grad, self._sum_to(grad, y.shape)])

    def subtract(self, x: Ref, y: Ref) -> Ref:
        """Element by element."""
        result = self._make("aten::sub", [("self", x), ("other", y)], x.shape, [("alpha", 1)], overload="Tensor")
        return self._note("SubBackward0", result, (x, y), lambda grad: [
            grad, self.compute("aten::neg", [("self", grad)], y.shape)
        ])  # fmt: skip

    def add_up(self, x: Ref, dim: int, *, keepdim: bool = False) -> Ref:
        """The sum along one dimension."""
        shape = tuple(1 if i == dim else n for i, n in enumerate(x.shape) if keepdim or i != dim)
        result = self._make("aten::sum", [("self", x)], shape, _over((dim,), keepdim), overload="dim_IntList")

        def write(grad: Ref) -> Grads:
            kept = tuple(1 if i == dim else n for i, n in enumerate(x.shape))
            spread = grad if keepdim else self._view(grad, kept, "aten::unsqueeze")
            strides = tuple(0 if i == dim else step for i, step in enumerate(spread.spec.stride))
            wide = self.add_view(spread, x.shape, strides)
            self.add_op("aten::expand", [("self", spread)], [wide], [("size", x.shape), ("implicit", False)])
            return [wide]

        return self._note("SumBackward1", result, (x,), write)

    def join(self, parts: Sequence[Ref], dim: int) -> Ref:
        """Side by side along one dimension."""
        shape = tuple(sum(p.shape[dim] for p in parts) if i == dim else n for i, n in enumerate(parts[0].shape))
        result = self._make("aten::cat", [("tensors", list(parts))], shape, [("dim", dim)])

        def write(grad: Ref) -> Grads:
            slices, start = [], 0
            for part in parts:
                slices.append(self.add_slice(grad, dim, start, start + part.shape[dim], module="")[0])
                start += part.shape[dim]
            return slices

        return self._note("CatBackward0", result, tuple(parts), write)

    def reshape(self, x: Ref, *shape: int) -> Ref:
        """Another shape of the same elements."""
        self.open_scope("aten::view", Phase.FORWARD)
        return self._note_view(self._view(x, shape), x)

    def take(self, x: Ref, dim: int, start: int, end: int) -> Ref:
        """A slice of one dimension; its gradient is one of zeros around it."""
        self.open_scope("aten::slice", Phase.FORWARD)
        part, _ = self.add_slice(x, dim, start, end, module="")

        def write(grad: Ref) -> Grads:
            scalars: Scalars = [("input_sizes", x.shape), ("dim", dim), ("start", start), ("end", end), ("step", 1)]
            return [self.compute("aten::slice_backward", [("grad_output", grad)], x.shape, scalars)]

        return self._note("SliceBackward0", part, (x,), write)

    def split(self, x: Ref, count: int) -> list[Ref]:
        """Equal slices of the last dimension, whose gradients are joined."""
        width, last = x.shape[-1] // count, len(x.shape) - 1
        self.open_scope("aten::chunk", Phase.FORWARD)
        parts = [self.add_view(x, (*x.shape[:-1], width), x.spec.stride) for _ in range(count)]
        scalars: Scalars = [("split_size", width), ("dim", -1)]
        self.add_op("aten::split", [("self", x)], parts, scalars, overload="Tensor")
        self._wanted.update(part.tensor for part in parts)

        def write(*grads: Ref) -> Grads:
            return [self.compute("aten::cat", [("tensors", grads)], x.shape, [("dim", last)])]

        self._nodes.append(_Node("SplitBackward0", tuple(parts), (x,), write))
        return parts

    def expand(self, x: Ref, *shape: int) -> Ref:
        """Seen through stride 0 where it is broadcast; its gradient is added up."""
        self.open_scope("aten::expand_as", Phase.FORWARD)
        strides = [0 if n != m else step for n, m, step in zip(x.shape, shape, x.spec.stride, strict=True)]
        wide = self.add_view(x, shape, strides)
        self.add_op("aten::expand", [("self", x)], [wide], [("size", shape), ("implicit", False)])
        return self._note("ExpandBackward0", wide, (x,), lambda grad: [self._sum_to(grad, x.shape)])

    def swap(self, x: Ref, first: int, second: int) -> Ref:
        """Two dimensions in each other's place, without a copy."""
        self.open_scope("aten::transpose", Phase.FORWARD)
        result = self._transpose(x, first, second)
        return self._note("TransposeBackward0", result, (x,), lambda grad: [self._transpose(grad, first, second)])

    def multiply_matrices(self, x: Ref, y: Ref) -> Ref:
        """A product of matrices, or one of each of a batch of them."""
        name = "mm" if len(x.shape) == 2 else "bmm"
        shape = (*x.shape[:-1], y.shape[-1])
        result = self._make(f"aten::{name}", [("self", x), ("mat2", y)], shape)

        def write(grad: Ref) -> Grads:
            last = len(x.shape) - 2, len(x.shape) - 1
            made: list[Ref | None] = [None, None]
            if x.tensor in self._wanted:
                over = self._transpose(y, *last)
                made[0] = self.compute(f"aten::{name}", [("self", grad), ("mat2", over)], x.shape)
            if y.tensor in self._wanted:
                over = self._transpose(x, *last)
                made[1] = self.compute(f"aten::{name}", [("self", over), ("mat2", grad)], y.shape)
            return made

        return self._note(f"{name.title()}Backward0", result, (x, y), write)

    def normalise(self, x: Ref) -> Ref:
        """Layer norm over the last dimension, with weight and bias."""
        width = x.shape[-1]
        weight, bias = self.make_parameter(width), self.make_parameter(width)
        mean, root = (self.add_tensor((*x.shape[:-1], 1)) for _ in range(2))
        self.open_scope("aten::layer_norm", Phase.FORWARD)
        result = self.add_tensor(x.shape)
        arguments = [("input", x), ("weight", weight), ("bias", bias)]
        scalars: Scalars = [("normalized_shape", (width,)), ("eps", 1e-05)]
        self.add_op("aten::native_layer_norm", arguments, [result, mean, root], scalars)

        def write(grad: Ref) -> Grads:
            grads = [self.add_tensor(x.shape), self.add_tensor((width,)), self.add_tensor((width,))]
            saved = [
                ("grad_out", grad),
                ("input", x),
                ("mean", mean),
                ("rstd", root),
                ("weight", weight),
                ("bias", bias),
            ]
            mask: Scalars = [("normalized_shape", (width,)), ("output_mask", (True, True, True))]
            self.add_op("aten::native_layer_norm_backward", saved, grads, mask)
            return grads

        return self._note("NativeLayerNormBackward0", result, (x, weight, bias), write)

    def attend(self, query: Ref, key: Ref, value: Ref) -> Ref:
        """Causal attention in one fused kernel: [batch, heads, length, width] each."""
        self.open_scope("aten::scaled_dot_product_attention", Phase.FORWARD)
        result = self.add_tensor((*query.shape[:-1], value.shape[-1]))
        sums = self.add_tensor(query.shape[:-1])
        seeds = [self.add_tensor((), "int64") for _ in range(2)]
        arguments: list[tuple[str, Ref]] = [("query", query), ("key", key), ("value", value)]
        scalars: Scalars = [("attn_bias", None), ("compute_log_sumexp", True), ("dropout_p", 0.0), ("is_causal", True),
                            ("scale", None)]  # fmt: skip
        name = "aten::_scaled_dot_product_efficient_attention"
        self.add_op(name, arguments, [result, sums, *seeds], scalars)

        def write(grad: Ref) -> Grads:
            grads = [self.add_tensor(one.shape) for one in (query, key, value)]
            saved = [("out", result), ("logsumexp", sums), ("philox_seed", seeds[0]), ("philox_offset", seeds[1])]
            mask: Scalars = [("attn_bias", None), ("dropout_p", 0.0), ("grad_input_mask", (True, True, True, False)),
                             ("is_causal", True), ("scale", None)]  # fmt: skip
            self.add_op(f"{name}_backward", [("grad_out_", grad), *arguments, *saved], grads, mask)
            return grads

        title = "ScaledDotProductEfficientAttentionBackward0"
        return self._note(title, result, (query, key, value), write)

    def attend_pointwise(self, query: Ref, key: Ref, value: Ref, offsets: Ref, length: int) -> Ref:
        """HSTU's causal attention, SiLU of every score, in one kernel over sequences laid end to end [tokens, heads,
        width]; of `length` each they would have as many pairs."""
        result = self._make(POINTWISE, [("q", query), ("k", key), ("v", value), ("offsets", offsets)], query.shape,
                            [(EFFECTIVE_LENGTH, length)])  # fmt: skip

        def write(grad: Ref) -> Grads:
            grads = [self.add_tensor(one.shape) for one in (query, key, value)]
            saved = [("dout", grad), ("q", query), ("k", key), ("v", value), ("offsets", offsets)]
            self.add_op(POINTWISE_BACKWARD, saved, grads, [(EFFECTIVE_LENGTH, length)])
            return grads

        return self._note("HstuAttentionBackward", result, (query, key, value), write)

    def look_up(self, tables: Sequence[Table], bags: int) -> Ref:
        """Rows [bags, columns of all tables], pooled, and updated in backward: one module for tables that are kept
        alike."""
        groups: dict[tuple[Storage, int], list[Table]] = {}
        for table in tables:
            kept = self._storages.get(table.name, DEVICE)
            groups.setdefault((kept, table.dim if kept.kind == "hash" else 0), []).append(table)
        parts = [self._look_up_alike(kept, tuple(held), bags) for (kept, _), held in groups.items()]
        return parts[0] if len(parts) == 1 else self.join(parts, 1)

    def _look_up_alike(self, kept: Storage, tables: tuple[Table, ...], bags: int) -> Ref:
        dims = tuple(table.dim for table in tables)
        forms: Scalars = [
            ("total_D", sum(dims)), ("max_D", max(dims)), ("rows", tuple(table.rows for table in tables)),
            ("dims", dims), ("pooling", tuple(table.pooling.mean for table in tables)),
            ("access", tuple(format_access(table.access) for table in tables)),
        ]  # fmt: skip
        pooled, update, begin = write_lookup(self, kept, tables, forms, bags, f"tables{len(self.tables)}")
        self.tables.append(tables)
        self._at_backward += begin
        self._wanted.add(pooled.tensor)

        def write(grad: Ref) -> Grads:
            update(grad)
            return []

        self._nodes.append(_Node("", (pooled,), (), write))
        return pooled

    def convert_jagged(self, name: str, back: str, x: Ref, shape: Sequence[int], offsets: Ref, scalars: Scalars) -> Ref:
        """An op of FBGEMM's that moves rows between jagged and padded, whose gradient goes the other way."""
        result = self._make(name, [("values", x), ("offsets", offsets)], shape, scalars)
        return self._note(f"{name.rpartition(':')[2]}Backward", result, (x,), lambda grad: [
            self.compute(back, [("values", grad), ("offsets", offsets)], x.shape, scalars)
        ])  # fmt: skip

    # ---- backward

    def write_loss(self, logits: Ref) -> None:
        """Binary cross-entropy of logits against clicks, and everything back from it."""
        target = self.make_input(*logits.shape)
        mean, op = write_loss_forward(self, "logits", logits, target)
        one = write_backward_start(self, mean)
        grad = write_loss_backward(self, "logits", one, logits, target, forward=op)
        self._write_backward(logits, grad)

    def _write_backward(self, result: Ref, grad: Ref) -> None:
        known: dict[int, Ref] = {result.tensor: grad}
        for begin in self._at_backward:
            begin()
        for node in reversed(self._nodes):
            taken = [known.pop(result.tensor) for result in node.results if result.tensor in known]
            if len(taken) < len(node.results):
                continue
            if node.title:
                self.open_scope(node.title, Phase.BACKWARD)
            for one, made in zip(node.inputs, node.write(*taken), strict=False):
                if made is None or one.tensor not in self._wanted:
                    continue
                if one in self.parameters:
                    self._accumulate(one, made)
                elif one.tensor in known:
                    arguments = [("self", known[one.tensor]), ("other", made)]
                    known[one.tensor] = self.compute(
                        "aten::add", arguments, one.shape, [("alpha", 1)], overload="Tensor"
                    )
                else:
                    known[one.tensor] = made

    def _accumulate(self, parameter: Ref, grad: Ref) -> None:
        self.open_scope(ACCUMULATE_GRAD, Phase.BACKWARD)
        kept = self.add_view(grad, parameter.shape)
        self.add_op("aten::detach", [("self", grad)], [kept])
        self.target.set_kind(grad.storage, StorageKind.GRADIENT)
        self.gradients[parameter.tensor] = kept

    # ---- writing

    def _make(
        self, name: str, arguments: Arguments, shape: Sequence[int], scalars: Scalars = (), *, overload: str = ""
    ) -> Ref:
        self.open_scope(name, Phase.FORWARD)
        return self.compute(name, arguments, shape, scalars, overload=overload)

    def _note(self, title: str, result: Ref, inputs: tuple[Ref, ...], write: Callable[[Ref], Grads]) -> Ref:
        if any(one.tensor in self._wanted for one in inputs):
            self._wanted.add(result.tensor)
            self._nodes.append(_Node(title, (result,), inputs, write))
        return result

    def _view(self, x: Ref, shape: Sequence[int], name: str = "aten::view") -> Ref:
        seen = self.add_view(x, tuple(shape))
        self.add_op(name, [("self", x)], [seen], [("size", tuple(shape))])
        return seen

    def _note_view(self, seen: Ref, x: Ref) -> Ref:
        return self._note("ViewBackward0", seen, (x,), lambda grad: [self._view(grad, x.shape)])

    def _transpose(self, x: Ref, first: int, second: int) -> Ref:
        shape, stride = list(x.shape), list(x.spec.stride)
        for of in (shape, stride):
            of[first], of[second] = of[second], of[first]
        seen = self.add_view(x, shape, stride)
        scalars: Scalars = [("dim0", first), ("dim1", second)]
        self.add_op("aten::transpose", [("self", x)], [seen], scalars, overload="int")
        return seen

    def _sum_to(self, grad: Ref, shape: Sequence[int]) -> Ref:
        """The gradient of what was broadcast: added up to its shape."""
        if grad.shape == tuple(shape):
            return grad
        lead = len(grad.shape) - len(shape)
        padded = (1,) * lead + tuple(shape)
        dims = tuple(i for i, (n, m) in enumerate(zip(grad.shape, padded, strict=True)) if n != m)
        summed = self.compute("aten::sum", [("self", grad)], padded, _over(dims, True), overload="dim_IntList")
        return self._view(summed, shape) if lead else summed


_UNARY: dict[str, tuple[str, bool, Scalars]] = {
    "relu": ("threshold_backward", True, [("threshold", 0)]),
    "sigmoid": ("sigmoid_backward", True, []),
    "silu": ("silu_backward", False, []),
    "gelu": ("gelu_backward", False, [("approximate", "none")]),
}


def _over(dims: tuple[int, ...], keepdim: bool) -> Scalars:
    return [("dim", dims), ("keepdim", keepdim), ("dtype", None)]


def _broadcast(x: Ref, y: Ref) -> tuple[int, ...]:
    longer, shorter = (x.shape, y.shape) if len(x.shape) >= len(y.shape) else (y.shape, x.shape)
    padded = (1,) * (len(longer) - len(shorter)) + shorter
    return tuple(max(n, m) for n, m in zip(longer, padded, strict=True))
