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


def write_concatenation(builder: StepBuilder, dense: Ref, pooled: Ref) -> Interaction:
    """Dense vector and embeddings side by side: the whole of the `cat` interaction."""
    batch, tables, dim = pooled.shape
    builder.open_scope("aten::view")
    flat = builder.add_view(pooled, (batch, tables * dim))
    view = builder.add_op("aten::view", [("self", pooled)], [flat], [("size", (batch, -1))], module=MODEL)
    joined = builder.add_tensor((batch, dense.shape[1] + tables * dim))
    return Interaction(dense, pooled, joined, view, _write_cat(builder, (dense, flat), joined, MODEL))


def write_dot(builder: StepBuilder, dense: Ref, pooled: Ref, *, keep: bool) -> tuple[Interaction, Ref]:
    """The `write_dot` interaction, and its result. With `keep` (training) tensors stay for the backward pass."""
    batch, tables, dim = pooled.shape
    builder.open_scope("aten::view")
    row = builder.add_view(dense, (batch, 1, dim))
    view = builder.add_op("aten::view", [("self", dense)], [row], [("size", (batch, 1, dim))], module=MODEL)
    joined = builder.add_tensor((batch, tables + 1, dim))
    done = Interaction(dense, pooled, joined, view, _write_cat(builder, (row, pooled), joined, MODEL))
    return done, write_dot_products(builder, done, keep=keep)


def write_dot_products(builder: StepBuilder, done: Interaction, *, keep: bool) -> Ref:
    """The lower triangle of the dot products of what is joined, after the dense vector."""
    dense, joined = done.dense, done.joined
    batch, features, dim = joined.shape
    builder.open_scope("aten::transpose")
    done.flipped, done.transpose_op = _write_transpose(builder, joined, MODULE)
    builder.open_scope("aten::bmm")
    done.flipped, flipped_cast = builder.add_autocast(done.flipped, MODULE)
    done.factor, joined_cast = builder.add_autocast(joined, MODULE)
    done.casts, dtype = (joined_cast, flipped_cast), done.factor.spec.dtype
    products = builder.add_tensor((batch, features, features), dtype)
    done.bmm_op = builder.add_op(
        "aten::bmm", [("self", done.factor), ("mat2", done.flipped)], [products], module=MODULE
    )
    pairs = features * (features - 1) // 2
    done.positions = (_make_positions(builder, pairs), _make_positions(builder, pairs))
    builder.open_scope("aten::slice", Phase.FORWARD)
    whole, done.slice_op = builder.add_slice(products, 0, 0, batch, module=MODULE)
    builder.open_scope("aten::index")
    triangle = builder.add_tensor((batch, pairs), dtype)
    done.index_op = builder.add_op(
        "aten::index", [("self", whole), ("indices", done.positions)], [triangle],
        [("indices_given", (False, True, True))], overload="Tensor", module=MODULE,
    )  # fmt: skip
    result = builder.add_tensor((batch, dim + pairs), dtype)
    done.outer_cat_op = _write_cat(builder, (dense, triangle), result, MODULE)
    builder.free_tensors(triangle, products, *([joined] if joined_cast >= 0 else []))
    if not keep:
        builder.free_tensors(joined, *done.positions)
    return result


def write_concatenate_backward(builder: StepBuilder, done: Interaction, grad: Ref) -> tuple[Ref, Ref]:
    """Gradients of the dense vector and of the embeddings from that of the concatenation."""
    _, tables, dim = done.pooled.shape
    builder.open_scope("CatBackward0", Phase.BACKWARD)
    to_dense, flat = builder.add_column_slices(
        grad, (done.dense.shape[1], tables * dim), module=MODEL, forward=done.cat_op
    )
    builder.open_scope("ViewBackward0")
    to_pooled = builder.add_view(flat, done.pooled.shape, (grad.spec.stride[0], dim, 1))
    builder.add_reshape(flat, to_pooled, module=MODEL, forward=done.view_op)
    return to_dense, to_pooled


def write_dot_backward(builder: StepBuilder, done: Interaction, grad: Ref) -> tuple[Ref, Ref]:
    """Gradients of the dense vector and of the embeddings from that of the interaction's result."""
    batch, tables, dim = done.pooled.shape
    to_dense, to_joined = write_dot_products_backward(builder, done, grad)
    builder.open_scope("CatBackward0")
    row, to_pooled = builder.add_column_slices(to_joined, (1, tables), module=MODEL, forward=done.cat_op)
    builder.open_scope("ViewBackward0")
    again = builder.add_view(row, (batch, dim), (row.spec.stride[0], 1))
    builder.add_reshape(row, again, module=MODEL, forward=done.view_op)
    total = builder.add_tensor((batch, dim))
    _write_gradient_sum(builder, to_dense, again, total, MODEL, done.view_op)
    builder.free_tensors(grad)
    return total, to_pooled


def write_dot_products_backward(builder: StepBuilder, done: Interaction, grad: Ref) -> tuple[Ref, Ref]:
    """Gradients of the dense vector (its own part) and of what was joined."""
    width = done.dense.shape[1]
    builder.open_scope("CatBackward0", Phase.BACKWARD)
    widths = (width, grad.shape[1] - width)
    to_dense, triangle = builder.add_column_slices(grad, widths, module=MODULE, forward=done.outer_cat_op)
    products = _write_triangle_backward(builder, done, triangle)
    return to_dense, _write_gemm_backward(builder, done, products)


def _write_triangle_backward(builder: StepBuilder, done: Interaction, triangle: Ref) -> Ref:
    """From the lower triangle back to the square of dot products."""
    assert done.positions is not None
    batch, features, _ = done.joined.shape
    shape = (batch, features, features)
    builder.open_scope("IndexBackward0")
    dtype = triangle.spec.dtype
    size: Scalars = [("size", shape), ("dtype", dtype)]
    zeros = builder.compute(
        "aten::new_zeros", [("self", triangle)], shape, size, dtype=dtype, module=MODULE, forward=done.index_op
    )
    arguments: Arguments = [("self", zeros), ("indices", done.positions), ("values", triangle)]
    scalars: Scalars = [("indices_given", (False, True, True)), ("accumulate", True), ("unsafe", False)]
    builder.add_op("aten::_index_put_impl_", arguments, [zeros], scalars, module=MODULE, forward=done.index_op)
    builder.free_tensors(*done.positions)
    builder.open_scope("SliceBackward0")
    scalars = [("input_sizes", shape), ("dim", 0), ("start", 0), ("end", batch), ("step", 1)]
    square = builder.compute(
        "aten::slice_backward", [("grad_output", zeros)], shape, scalars, dtype=dtype, module=MODULE,
        forward=done.slice_op,
    )  # fmt: skip
    builder.free_tensors(zeros)
    return square


def _write_gemm_backward(builder: StepBuilder, done: Interaction, square: Ref) -> Ref:
    """From the dot products back to the joined vectors, which enter them twice."""
    assert done.flipped is not None and done.factor is not None
    batch, features, dim = done.joined.shape
    dtype, (joined_cast, flipped_cast) = square.spec.dtype, done.casts
    bmm = partial(builder.compute, "aten::bmm", dtype=dtype, module=MODULE, forward=done.bmm_op)
    builder.open_scope("BmmBackward0")
    left, _ = _write_transpose(builder, done.factor, MODULE, done.bmm_op)
    right_grad = bmm([("self", left), ("mat2", square)], (batch, dim, features))
    right, _ = _write_transpose(builder, done.flipped, MODULE, done.bmm_op)
    left_grad = bmm([("self", square), ("mat2", right)], (batch, features, dim))
    builder.free_tensors(square, done.factor, *([done.flipped] if flipped_cast >= 0 else []))
    left_grad = builder.add_cast_backward(left_grad, joined_cast, module=MODULE)
    right_grad = builder.add_cast_backward(right_grad, flipped_cast, module=MODULE)
    builder.open_scope("TransposeBackward0")
    turned, _ = _write_transpose(builder, right_grad, MODULE, done.transpose_op)
    _write_gradient_sum(builder, left_grad, turned, left_grad, MODULE, done.transpose_op)
    builder.free_tensors(right_grad)
    return left_grad


def _make_positions(builder: StepBuilder, pairs: int) -> Ref:
    """A list of positions made on the host, where it stays: the gather and its backward copy it over themselves."""
    host = builder.add_resident_tensor((pairs,), StorageKind.ACTIVATION, "int64", "cpu")
    builder.open_scope("aten::empty")
    builder.open_scope("aten::to")
    builder.open_scope("aten::lift_fresh", Phase.FORWARD)
    builder.add_op("aten::lift_fresh", [("self", host)], [host], module=MODULE)
    builder.open_scope("aten::detach_")
    return host


def _write_cat(builder: StepBuilder, parts: tuple[Ref, ...], joined: Ref, module: str) -> int:
    builder.open_scope("aten::cat")
    return builder.add_op("aten::cat", [("tensors", parts)], [joined], [("dim", 1)], module=module)


def _write_transpose(builder: StepBuilder, source: Ref, module: str, forward: int = -1) -> tuple[Ref, int]:
    """Swaps the last two of three dimensions."""
    (a, b, c), (i, j, k) = source.shape, source.spec.stride
    turned = builder.add_view(source, (a, c, b), (i, k, j))
    scalars = [("dim0", 1), ("dim1", 2)]
    op = builder.add_op(
        "aten::transpose", [("self", source)], [turned], scalars, overload="int", module=module, forward=forward
    )
    return turned, op


def _write_gradient_sum(builder: StepBuilder, first: Ref, second: Ref, total: Ref, module: str, forward: int) -> None:
    """The engine's own sum of two gradients of one tensor, in place when the first has its memory to itself."""
    name = "aten::add_" if total is first else "aten::add"
    builder.open_engine_op_scope(name)
    arguments = [("self", first), ("other", second)]
    builder.add_op(name, arguments, [total], [("alpha", 1)], overload="Tensor", module=module, forward=forward)
