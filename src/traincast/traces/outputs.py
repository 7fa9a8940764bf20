"""What an op returns, from what it was given: timelines record no outputs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from traincast.ir.ops import TensorSpec
from traincast.traces.arguments import RecordedArguments, make_contiguous_tensor

# ops that take this many tensors; one more is the tensor that the result is written into
_UNARY = frozenset({
    "abs", "clamp", "clamp_min", "clamp_max", "neg", "sqrt", "rsqrt", "exp", "log", "tanh", "sigmoid", "relu",
    "gelu", "silu", "sum", "mean", "zero", "fill",
})  # fmt: skip
_BINARY = frozenset({
    "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "threshold_backward", "tanh_backward",
    "sigmoid_backward", "bmm", "mm", "maximum", "minimum",
})  # fmt: skip
_COMPARES = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf", "isfinite"}
)
_REDUCES = frozenset({"aten::sum", "aten::mean", "aten::max", "aten::min", "aten::any", "aten::all", "aten::norm"})
# those whose second argument is a list of dimensions, or one of them
_REDUCES_ONE = frozenset({"aten::any", "aten::all", "aten::max", "aten::min", "aten::argmax", "aten::argmin"})
_REDUCES_DIMS = _REDUCES_ONE | {"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::logsumexp"}
_UPSAMPLE = re.compile(r"aten::_?upsample_\w+?[123]d\w*$")
_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_"})
_GATHERS = frozenset({"aten::index_select", "aten::gather", "aten::take", "aten::take_along_dim"})
_LOSSES = frozenset({"aten::mse_loss", "aten::binary_cross_entropy", "aten::nll_loss_forward", "aten::l1_loss"})
_BAGS = frozenset({"aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"})


def split_out(name: str, tensors: Sequence[TensorSpec]) -> tuple[tuple[TensorSpec, ...], TensorSpec | None]:
    """The tensors an op reads, and the one it writes into when it was given one (`out=`)."""
    plain = name.removeprefix("aten::")
    most = 1 if plain in _UNARY else 2 if plain in _BINARY else len(tensors)
    return tuple(tensors[:most]), tensors[most] if len(tensors) > most else None


def derive_outputs(name: str, inputs: Sequence[TensorSpec], *, backward: bool) -> tuple[TensorSpec, ...]:
    """The results of an op whose result follows from its inputs; `backward` says that it computes gradients."""
    first = inputs[0]
    if name.endswith("_"):
        return (first,)
    if name in _PRODUCTS:
        left, right = inputs[-2], inputs[-1]
        return (make_contiguous_tensor((*left.shape[:-1], right.shape[-1]), left.dtype),)
    if name in _REDUCES:  # gradients are summed over the batch, losses over everything
        summed = backward and len(first.shape) > 1
        return (make_contiguous_tensor((1, *first.shape[1:]) if summed else (), first.dtype),)
    if name in _LOSSES:
        return (make_contiguous_tensor((), first.dtype),)
    if name in _BAGS and len(inputs) > 2:  # one result a bag, which begin where the third input says
        return (make_contiguous_tensor((*inputs[2].shape, first.shape[-1]), first.dtype),)
    if name == "aten::embedding":
        return (make_contiguous_tensor((*inputs[1].shape, first.shape[-1]), first.dtype),)
    dtype = "bool" if name.removeprefix("aten::") in _COMPARES else _promote_dtype(inputs)
    return (make_contiguous_tensor(_broadcast_shapes(inputs), dtype),)


def find_reduced_dims(name: str, source: TensorSpec, recorded: RecordedArguments) -> tuple[int, ...] | None:
    """The dimensions that a reduction was told to reduce, counted from the first; None where that was not recorded."""
    if name not in _REDUCES_DIMS or not source.shape:
        return None
    text = recorded.values[1] if len(recorded.values) > 1 else ""
    dims = recorded.get_integers(1) if text.startswith("[") or name in _REDUCES_ONE else None
    rank = len(source.shape)
    if not dims or not all(-rank <= dim < rank for dim in dims):
        return None
    return tuple(sorted({dim % rank for dim in dims}))


def infer_sized_output(name: str, source: TensorSpec, recorded: RecordedArguments) -> TensorSpec | None:
    """The result of an op that was told its size, which dimensions to reduce or which elements to take; None for
    others."""
    taken = _infer_taken(name, source, recorded)
    if taken is not None:
        return taken
    dims = find_reduced_dims(name, source, recorded)
    if dims is not None:
        kept = tuple(1 if axis in dims else size for axis, size in enumerate(source.shape))
        return make_contiguous_tensor(kept, "int64" if "arg" in name else source.dtype)
    if not _UPSAMPLE.match(name):
        return None
    size = recorded.get_integers(2 if name.endswith("_backward") else 1)
    whole = size if name.endswith("_backward") else (*source.shape[:2], *(size or ()))
    sound = whole is not None and len(whole) == len(source.shape) and all(length > 0 for length in whole)
    return make_contiguous_tensor(tuple(whole or ()), source.dtype) if sound else None


def _infer_taken(name: str, source: TensorSpec, recorded: RecordedArguments) -> TensorSpec | None:
    """What a gather takes out of a tensor, such as a few tokens of a cache: as much as it has indices."""
    tensors = recorded.tensors
    if name not in _GATHERS or len(tensors) < 2 or not source.shape:
        return None
    if name != "aten::index_select":
        return make_contiguous_tensor(tensors[1].shape, source.dtype)
    axis = (recorded.get_integers(1) or (0,))[0] % len(source.shape)
    shape = (*source.shape[:axis], tensors[1].numel, *source.shape[axis + 1 :])
    return make_contiguous_tensor(shape, source.dtype)


def _promote_dtype(inputs: Sequence[TensorSpec]) -> str:
    """The element type of a result: a floating one wins over integers, a tensor over a single number."""
    real = [spec for spec in inputs if spec.shape] or list(inputs)
    return next((spec.dtype for spec in real if "float" in spec.dtype), real[0].dtype)


def _broadcast_shapes(inputs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The common shape, or that of the first where the inputs do not go together."""
    rank = max(len(spec.shape) for spec in inputs)
    shape = [1] * rank
    for spec in inputs:
        for axis, size in enumerate(spec.shape, start=rank - len(spec.shape)):
            if size != 1 and shape[axis] not in (1, size):
                return inputs[0].shape
            shape[axis] = size if size != 1 else shape[axis]
    return tuple(shape)


def infer_window(image: int, result: int, kernel: int) -> tuple[int, int] | None:
    """The smallest stride and the padding that make `result` positions of `image` with a window of `kernel`."""
    for stride in range(1, max(kernel, 4) + 1):
        padding = max(-(-((result - 1) * stride + kernel - image) // 2), 0)
        if padding <= kernel // 2 and (image + 2 * padding - kernel) // stride + 1 == result:
            return stride, padding
    return None
