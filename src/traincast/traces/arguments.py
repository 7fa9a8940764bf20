"""What a trace recorded about an op's arguments, as tensors, and what the op returns: timelines record no outputs, no
devices, and strides in new versions only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from traincast.ir.ops import TensorSpec

# every name that Kineto and execution traces have for an element type
DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "int": "int32", "short": "int16", "short int": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
}  # fmt: skip
_NOT_A_TENSOR = frozenset({"Scalar", "Int", "Bool", "Double", "Device", "Stream", "Number", "None", "String", "Long"})
_ELEMENT = re.compile(r"Tensor\(([^()]*)\)")
_NUMBERS = re.compile(r"\[?((?:-?\d{1,9}(?:, ?)?)+)\]?")
_MAX_DIMENSION = 1 << 48  # no memory holds a tensor with a longer side; products of sizes stay small


@dataclass(frozen=True, slots=True)
class RecordedArguments:
    """The tensors of each argument in order (none for a number), of the outputs (None where not recorded), and whether
    some argument is a list whose shapes were not recorded.

    `strided` says that strides were recorded (else tensors are given in row-major order), `values` are the arguments
    that are no tensors, as text ("" for those that are; none where not recorded). `listed` are the shapes of a list
    where its tensors have shapes but no types.
    """

    inputs: tuple[tuple[TensorSpec, ...], ...]
    outputs: tuple[TensorSpec, ...] | None
    incomplete: bool
    strided: bool = False
    values: tuple[str, ...] = ()
    listed: tuple[tuple[int, ...], ...] = ()

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All input tensors in order."""
        return tuple(spec for argument in self.inputs for spec in argument)

    def get_integers(self, index: int) -> tuple[int, ...] | None:
        """Argument number `index` as integers ("[2, 2]", "1"); None where it was not recorded as such."""
        text = self.values[index] if index < len(self.values) else ""
        digits = _NUMBERS.fullmatch(text)
        return tuple(int(n) for n in digits[1].split(",") if n.strip()) if digits else None


def make_contiguous_tensor(shape: tuple[int, ...], dtype: str, device: str = "cuda") -> TensorSpec:
    """A tensor in row-major order."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return TensorSpec(shape, tuple(reversed(stride)), dtype, device)


@lru_cache(maxsize=1 << 14)
def parse_arguments(details: bytes) -> RecordedArguments | None:
    """The recorded arguments of an op; None where no shapes were recorded or they make no sense."""
    try:
        document = msgspec.json.decode(details or b"null")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("dims"), list):
        return None
    dims, types = document["dims"], document.get("types")
    if not isinstance(types, list) or len(types) != len(dims):
        return None
    strides, values = document.get("strides"), document.get("values")
    laid_out = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
    arguments = [_read_argument(d, str(t), s) for d, t, s in zip(dims, types, laid_out, strict=True)]
    out_dims, out_types = document.get("output_dims"), document.get("output_types")
    outputs: tuple[TensorSpec, ...] | None = None
    if isinstance(out_dims, list) and isinstance(out_types, list) and len(out_dims) == len(out_types):
        results = [_read_argument(d, str(t)) for d, t in zip(out_dims, out_types, strict=True)]
        outputs = tuple(spec for argument in results for spec in argument or ())
    return RecordedArguments(
        inputs=tuple(argument or () for argument in arguments),
        outputs=outputs or None,
        incomplete=any(argument is None for argument in arguments),
        strided=laid_out is strides,
        values=tuple(value if isinstance(value, str) else "" for value in values) if isinstance(values, list) else (),
        listed=tuple(tuple(shape) for d, t in zip(dims, types, strict=True) for shape in _read_list(d, str(t))),
    )


def _read_list(dims: Any, kind: str) -> list[list[int]]:
    """The shapes of a list of tensors; none where one was not recorded."""
    listed = dims if kind == "TensorList" and isinstance(dims, list) else []
    return listed if all(_are_sizes(shape) for shape in listed) else []


def _read_argument(dims: Any, kind: str, strides: Any = None) -> tuple[TensorSpec, ...] | None:
    """The tensors of one argument; None for a list of tensors without shapes."""
    elements = _ELEMENT.findall(kind)
    if kind.startswith("GenericList[") and elements:
        kinds = [_ELEMENT.findall(member) for member in kind[len("GenericList[") :].split(",")]
        if not isinstance(dims, list) or len(dims) != len(kinds):
            return None
        known = isinstance(strides, list) and len(strides) == len(dims)
        laid_out = strides if known else [None] * len(dims)
        specs = [_read_tensor(d, member[0], s) for d, member, s in zip(dims, kinds, laid_out, strict=True) if member]
        return tuple(spec for spec in specs if spec is not None)
    if kind == "TensorList":
        return None
    if kind in _NOT_A_TENSOR and not dims:
        return ()
    spec = _read_tensor(dims, elements[0] if elements else kind, strides)
    return () if spec is None else (spec,)


def _read_tensor(dims: Any, element: str, strides: Any = None) -> TensorSpec | None:
    if element not in DTYPES or not _are_sizes(dims):
        return None
    if _are_sizes(strides) and len(strides) == len(dims):
        return TensorSpec(tuple(dims), tuple(strides), DTYPES[element])
    return make_contiguous_tensor(tuple(dims), DTYPES[element])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(size) is int and 0 <= size < _MAX_DIMENSION for size in values)


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
_LOSS_GRADIENTS = frozenset({"aten::nll_loss_backward", "aten::nll_loss2d_backward"})  # like what the loss was of
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
        return (make_contiguous_tensor((1, *first.shape[1:]) if summed else (), _find_sum_dtype(name, first)),)
    if name in _LOSS_GRADIENTS and len(inputs) > 1:
        return (inputs[1],)
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
        return make_contiguous_tensor(kept, "int64" if "arg" in name else _find_sum_dtype(name, source))
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


def _find_sum_dtype(name: str, source: TensorSpec) -> str:
    """The element type of a reduction's result: flags and integers are added up in 64 bits."""
    exact = "float" not in source.dtype and "complex" not in source.dtype
    return "int64" if name == "aten::sum" and exact else source.dtype


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
