"""The feature interaction of a DLRM: lower triangle of dot products, or concatenation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from traincast.ir.ops import Phase, StorageKind
from traincast.models.layers.builder import Arguments, Ref, Scalars, StepBuilder

MODEL = "Dlrm"
MODULE = "Dlrm.interaction"


@dataclass(slots=True)
class Interaction:
    """Ops and tensors of the forward pass that the backward pass refers to."""

    dense: Ref
    pooled: Ref
    joined: Ref
    view_op: int
    cat_op: int
    flipped: Ref | None = None
    factor: Ref | None = None  # what is multiplied with `flipped`: `joined`, cast under autocast
    casts: tuple[int, int] = (-1, -1)  # of `joined` and `flipped`
    positions: tuple[Ref, Ref] | None = None
    transpose_op: int = -1
    bmm_op: int = -1
    slice_op: int = -1
    index_op: int = -1
    outer_cat_op: int = -1


def concatenate(builder: StepBuilder, dense: Ref, pooled: Ref) -> Interaction:
    """Dense vector and embeddings side by side: the whole of the `cat` interaction."""
    batch, tables, dim = pooled.shape
    builder.scope("aten::view")
    flat = builder.view(pooled, (batch, tables * dim))
    view = builder.op("aten::view", [("self", pooled)], [flat], [("size", (batch, -1))], module=MODEL)
    joined = builder.new((batch, dense.shape[1] + tables * dim))
    return Interaction(dense, pooled, joined, view, _cat(builder, (dense, flat), joined, MODEL))


def dot(builder: StepBuilder, dense: Ref, pooled: Ref, *, keep: bool) -> tuple[Interaction, Ref]:
    """The `dot` interaction, and its result. With `keep` (training) tensors stay for the backward pass."""
    batch, tables, dim = pooled.shape
    builder.scope("aten::view")
    row = builder.view(dense, (batch, 1, dim))
    view = builder.op("aten::view", [("self", dense)], [row], [("size", (batch, 1, dim))], module=MODEL)
    joined = builder.new((batch, tables + 1, dim))
    done = Interaction(dense, pooled, joined, view, _cat(builder, (row, pooled), joined, MODEL))
    return done, dot_products(builder, done, keep=keep)


def dot_products(builder: StepBuilder, done: Interaction, *, keep: bool) -> Ref:
    """The lower triangle of the dot products of what is joined, after the dense vector."""
    dense, joined = done.dense, done.joined
    batch, features, dim = joined.shape
    builder.scope("aten::transpose")
    done.flipped, done.transpose_op = _transpose(builder, joined, MODULE)
    builder.scope("aten::bmm")
    done.flipped, flipped_cast = builder.autocast(done.flipped, MODULE)
    done.factor, joined_cast = builder.autocast(joined, MODULE)
    done.casts, dtype = (joined_cast, flipped_cast), done.factor.spec.dtype
    products = builder.new((batch, features, features), dtype)
    done.bmm_op = builder.op("aten::bmm", [("self", done.factor), ("mat2", done.flipped)], [products], module=MODULE)
    pairs = features * (features - 1) // 2
    done.positions = (_position(builder, pairs), _position(builder, pairs))
    builder.scope("aten::slice", Phase.FORWARD)
    whole, done.slice_op = builder.slice(products, 0, 0, batch, module=MODULE)
    builder.scope("aten::index")
    triangle = builder.new((batch, pairs), dtype)
    done.index_op = builder.op(
        "aten::index", [("self", whole), ("indices", done.positions)], [triangle],
        [("indices_given", (False, True, True))], overload="Tensor", module=MODULE,
    )  # fmt: skip
    result = builder.new((batch, dim + pairs), dtype)
    done.outer_cat_op = _cat(builder, (dense, triangle), result, MODULE)
    builder.free(triangle, products, *([joined] if joined_cast >= 0 else []))
    if not keep:
        builder.free(joined, *done.positions)
    return result


def concatenate_backward(builder: StepBuilder, done: Interaction, grad: Ref) -> tuple[Ref, Ref]:
    """Gradients of the dense vector and of the embeddings from that of the concatenation."""
    _, tables, dim = done.pooled.shape
    builder.scope("CatBackward0", Phase.BACKWARD)
    to_dense, flat = builder.slices(grad, (done.dense.shape[1], tables * dim), module=MODEL, forward=done.cat_op)
    builder.scope("ViewBackward0")
    to_pooled = builder.view(flat, done.pooled.shape, (grad.spec.stride[0], dim, 1))
    builder.reshaped(flat, to_pooled, module=MODEL, forward=done.view_op)
    return to_dense, to_pooled


def dot_backward(builder: StepBuilder, done: Interaction, grad: Ref) -> tuple[Ref, Ref]:
    """Gradients of the dense vector and of the embeddings from that of the interaction's result."""
    batch, tables, dim = done.pooled.shape
    to_dense, to_joined = dot_products_backward(builder, done, grad)
    builder.scope("CatBackward0")
    row, to_pooled = builder.slices(to_joined, (1, tables), module=MODEL, forward=done.cat_op)
    builder.scope("ViewBackward0")
    again = builder.view(row, (batch, dim), (row.spec.stride[0], 1))
    builder.reshaped(row, again, module=MODEL, forward=done.view_op)
    total = builder.new((batch, dim))
    _add(builder, to_dense, again, total, MODEL, done.view_op)
    builder.free(grad)
    return total, to_pooled


def dot_products_backward(builder: StepBuilder, done: Interaction, grad: Ref) -> tuple[Ref, Ref]:
    """Gradients of the dense vector (its own part) and of what was joined."""
    width = done.dense.shape[1]
    builder.scope("CatBackward0", Phase.BACKWARD)
    widths = (width, grad.shape[1] - width)
    to_dense, triangle = builder.slices(grad, widths, module=MODULE, forward=done.outer_cat_op)
    products = _triangle_backward(builder, done, triangle)
    return to_dense, _products_backward(builder, done, products)


def _triangle_backward(builder: StepBuilder, done: Interaction, triangle: Ref) -> Ref:
    """From the lower triangle back to the square of dot products."""
    assert done.positions is not None
    batch, features, _ = done.joined.shape
    shape = (batch, features, features)
    builder.scope("IndexBackward0")
    zeros = builder.new(shape, triangle.spec.dtype)
    size: Scalars = [("size", shape), ("dtype", triangle.spec.dtype)]
    builder.op("aten::new_zeros", [("self", triangle)], [zeros], size, module=MODULE, forward=done.index_op)
    arguments: Arguments = [("self", zeros), ("indices", done.positions), ("values", triangle)]
    scalars: Scalars = [("indices_given", (False, True, True)), ("accumulate", True), ("unsafe", False)]
    builder.op("aten::_index_put_impl_", arguments, [zeros], scalars, module=MODULE, forward=done.index_op)
    builder.free(*done.positions)
    builder.scope("SliceBackward0")
    square = builder.new(shape, zeros.spec.dtype)
    scalars = [("input_sizes", shape), ("dim", 0), ("start", 0), ("end", batch), ("step", 1)]
    builder.op(
        "aten::slice_backward", [("grad_output", zeros)], [square], scalars, module=MODULE, forward=done.slice_op
    )
    builder.free(zeros)
    return square


def _products_backward(builder: StepBuilder, done: Interaction, square: Ref) -> Ref:
    """From the dot products back to the joined vectors, which enter them twice."""
    assert done.flipped is not None and done.factor is not None
    batch, features, dim = done.joined.shape
    dtype, (joined_cast, flipped_cast) = square.spec.dtype, done.casts
    op = partial(builder.op, module=MODULE, forward=done.bmm_op)
    builder.scope("BmmBackward0")
    left, _ = _transpose(builder, done.factor, MODULE, done.bmm_op)
    right_grad = builder.new((batch, dim, features), dtype)
    op("aten::bmm", [("self", left), ("mat2", square)], [right_grad])
    right, _ = _transpose(builder, done.flipped, MODULE, done.bmm_op)
    left_grad = builder.new((batch, features, dim), dtype)
    op("aten::bmm", [("self", square), ("mat2", right)], [left_grad])
    builder.free(square, done.factor, *([done.flipped] if flipped_cast >= 0 else []))
    left_grad = builder.cast_backward(left_grad, joined_cast, module=MODULE)
    right_grad = builder.cast_backward(right_grad, flipped_cast, module=MODULE)
    builder.scope("TransposeBackward0")
    turned, _ = _transpose(builder, right_grad, MODULE, done.transpose_op)
    _add(builder, left_grad, turned, left_grad, MODULE, done.transpose_op)
    builder.free(right_grad)
    return left_grad


def _position(builder: StepBuilder, pairs: int) -> Ref:
    """A list of positions made on the host, where it stays: the gather and its backward copy it over themselves."""
    host = builder.resident((pairs,), StorageKind.ACTIVATION, "int64", "cpu")
    builder.scope("aten::empty")
    builder.scope("aten::to")
    builder.scope("aten::lift_fresh", Phase.FORWARD)
    builder.op("aten::lift_fresh", [("self", host)], [host], module=MODULE)
    builder.scope("aten::detach_")
    return host


def _cat(builder: StepBuilder, parts: tuple[Ref, ...], joined: Ref, module: str) -> int:
    builder.scope("aten::cat")
    return builder.op("aten::cat", [("tensors", parts)], [joined], [("dim", 1)], module=module)


def _transpose(builder: StepBuilder, source: Ref, module: str, forward: int = -1) -> tuple[Ref, int]:
    """Swaps the last two of three dimensions."""
    (a, b, c), (i, j, k) = source.shape, source.spec.stride
    turned = builder.view(source, (a, c, b), (i, k, j))
    scalars = [("dim0", 1), ("dim1", 2)]
    op = builder.op(
        "aten::transpose", [("self", source)], [turned], scalars, overload="int", module=module, forward=forward
    )
    return turned, op


def _add(builder: StepBuilder, first: Ref, second: Ref, total: Ref, module: str, forward: int) -> None:
    """The engine's own sum of two gradients of one tensor, in place when the first has its memory to itself."""
    name = "aten::add_" if total is first else "aten::add"
    builder.engine_op_scope(name)
    arguments = [("self", first), ("other", second)]
    builder.op(name, arguments, [total], [("alpha", 1)], overload="Tensor", module=module, forward=forward)
