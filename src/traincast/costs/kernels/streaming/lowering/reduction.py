"""Reductions over dimensions, scans and pooling, and multi-tensor launches: foreach ops, fused optimizers, gradient
unscaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    choose_reduction_kind,
    count_real_bytes,
    get_compute_type,
    has_same_layout,
    is_dense,
    is_on_device,
    list_read_operands,
    lowers,
    make_aten_names,
    read_integer_sizes,
    sum_real_bytes,
)
from traincast.costs.kernels.streaming import ELEMENTWISE, POOL, REDUCTION
from traincast.costs.kernels.streaming.launches import (
    make_elementwise_call,
    make_fill_kernel,
    make_iterated_call,
    make_reduction_call,
    make_small_kernel,
)
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.utils.errors import TraincastError

_REDUCTIONS = """
    sum mean max min amax amin aminmax all any prod argmax argmin norm linalg_vector_norm var std var_mean std_mean
    logsumexp nansum count_nonzero median nanmedian mode sum_to_size linalg_norm frobenius_norm nanmean
"""
_IN_TYPE_OF_RESULT = ("aten::sum", "aten::prod", "aten::nansum")
_SCANS = "cumsum cumsum_ cumprod cumprod_ cummax cummin logcumsumexp"
_UPSAMPLES = {
    f"aten::{prefix}upsample_{mode}{suffix}": taps
    for prefix in ("", "_")
    for mode, taps in (
        ("nearest1d", 1), ("nearest2d", 1), ("nearest3d", 1), ("nearest_exact1d", 1), ("nearest_exact2d", 1),
        ("linear1d", 2), ("bilinear2d", 4), ("trilinear3d", 8), ("bicubic2d", 16), ("bilinear2d_aa", 4),
    )
    for suffix in ("", "_backward")
}  # fmt: skip
_ADAPTIVE = tuple(
    f"aten::{name}"
    for name in ("_adaptive_avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d")
)


def _read_dims(value: Scalar) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return tuple(item for item in value if isinstance(item, int))
    return (value,) if isinstance(value, int) else ()


@lowers(*make_aten_names(_REDUCTIONS))
def lower_reduce(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; `max` and `min` of two tensors are element-wise. Flags and integers are added up in the type of the
    result: they are copied to it first."""
    source = signature.inputs[0]
    outputs = [spec for spec in signature.outputs if is_on_device(spec)]
    if not outputs or not source.numel:
        return ()
    if signature.tensors("other"):
        return (make_iterated_call("add", list_read_operands(signature), outputs),)
    kind = choose_reduction_kind(source, _read_dims(signature.scalar("dim")))
    if kind == "full" and max(spec.numel for spec in outputs) > 1:
        kind = "inner"
    exact = signature.name in _IN_TYPE_OF_RESULT and not source.dtype.startswith(("float", "bfloat", "complex"))
    if not exact or source.dtype == outputs[0].dtype:
        return (make_reduction_call(kind, source, outputs),)
    summed = replace(source, dtype=outputs[0].dtype)
    return (make_elementwise_call("copy", (source,), (summed,)), make_reduction_call(kind, summed, outputs))


@lowers(*make_aten_names(_SCANS))
def lower_scan(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A running sum: one kernel that reads and writes everything."""
    source = signature.inputs[0]
    outputs = [spec for spec in signature.outputs if is_on_device(spec)]
    if not outputs or not source.numel:
        return ()
    kind = choose_reduction_kind(source, _read_dims(signature.scalar("dim")))
    call = REDUCTION.call(
        "inner" if kind == "full" else kind,
        get_compute_type(source),
        elements=source.numel,
        outputs=source.numel,
        bytes_read=count_real_bytes(source),
        bytes_written=sum_real_bytes(outputs),
    )
    return (call,)


def _make_pool_call(kind: str, signature: Signature, window: int, reads: tuple[TensorSpec, ...]) -> KernelCall:
    result = signature.outputs[0]
    return POOL.call(
        kind,
        get_compute_type(result),
        elements=result.numel,
        window=window,
        bytes_read=sum_real_bytes(reads),
        bytes_written=sum_real_bytes(signature.outputs),
    )


def _count_window(signature: Signature) -> int:
    return prod(read_integer_sizes(signature.scalar("kernel_size"), len(signature.inputs[0].shape) - 2, 1))


@lowers(
    "aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "aten::avg_pool2d", "aten::avg_pool3d",
    "aten::max_pool2d", "aten::avg_pool1d",
)  # fmt: skip
def lower_pool(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel."""
    return (_make_pool_call("forward", signature, _count_window(signature), signature.inputs[:1]),)


@lowers("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def lower_max_pool_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then one kernel that reads the gradient and the stored positions."""
    reads = (signature.inputs[0], signature.inputs[-1])
    return (
        make_fill_kernel(signature.outputs[0]),
        _make_pool_call("backward", signature, _count_window(signature), reads),
    )


@lowers("aten::avg_pool2d_backward", "aten::avg_pool3d_backward")
def lower_avg_pool_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel."""
    return (_make_pool_call("backward", signature, _count_window(signature), signature.inputs[:1]),)


@lowers(*_ADAPTIVE)
def lower_adaptive_pool(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; down to a single position it is a mean."""
    source, result = signature.inputs[0], signature.outputs[0]
    window = -(-source.numel // max(1, result.numel))
    if prod(result.shape[2:]) == 1 and "avg" in signature.name:
        return (make_reduction_call("inner", source, (result,)),)
    return (_make_pool_call("forward", signature, window, (source,)),)


@lowers(*(f"{name}_backward" for name in _ADAPTIVE))
def lower_adaptive_pool_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then one kernel that spreads the gradient."""
    return (make_fill_kernel(signature.outputs[0]), _make_pool_call("backward", signature, 1, signature.inputs[:1]))


@lowers(*_UPSAMPLES)
def lower_upsample(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; backward adds into zeros."""
    taps = _UPSAMPLES[signature.name]
    if not signature.name.endswith("_backward"):
        return (_make_pool_call("forward", signature, taps, signature.inputs[:1]),)
    return (make_fill_kernel(signature.outputs[0]), _make_pool_call("backward", signature, taps, signature.inputs[:1]))


@lowers("aten::grid_sampler_2d", "aten::grid_sampler_2d_backward")
def lower_grid_sampler(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel with four taps; backward adds into zeros."""
    if signature.name.endswith("backward"):
        return (make_fill_kernel(signature.outputs[0]), _make_pool_call("backward", signature, 4, signature.inputs))
    return (_make_pool_call("forward", signature, 4, signature.inputs),)


# ATen's multi_tensor_apply: how many tensors and blocks one launch takes, by number of tensor lists
_MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_MAX_BLOCKS = 320  # of one launch of ATen's multi_tensor_apply
_MOST_LAUNCHES = 100_000  # 2e12 elements: more than any device holds
_CHUNK = 65536  # elements of a tensor that one block takes there

_FOREACH = {
    "add": "add sub neg abs sign maximum minimum clamp_max clamp_min lerp addcmul floor ceil round trunc frac",
    "mul": "mul",
    "div": "div addcdiv reciprocal",
    "pow": "pow sqrt rsqrt",
    "tanh": "tanh sigmoid sin cos tan asin acos atan sinh cosh",
    "exp": "exp expm1 log log2 log10 log1p erf erfc lgamma",
    "copy": "copy",
    "fill": "zero",
}
_FUSED_WRITES = {
    "aten::_fused_sgd": ("self", "momentum_buffer_list"),
    "aten::_fused_adam": ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    "aten::_fused_adamw": ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    "aten::_fused_adagrad": ("self", "state_sums"),
}


class _Launch(NamedTuple):
    """One launch: elements of each list it covers, and tensors of each list it touches."""

    elements: int
    tensors: int


def split_launches(sizes: Sequence[int], depth: int) -> Iterator[_Launch]:
    """How `multi_tensor_apply` cuts a list of tensors (of these numbers of elements) into launches."""
    most = _MAX_TENSORS[min(depth, 5)]
    if sum(sizes) > _MOST_LAUNCHES * _MAX_BLOCKS * _CHUNK:
        raise TraincastError(f"{sum(sizes)} elements are more than {_MOST_LAUNCHES} launches take")
    elements = tensors = blocks = 0
    for size in sizes:
        remaining = size
        tensors += 1 if size else 0
        while remaining > 0:
            room = (_MAX_BLOCKS - blocks) * _CHUNK
            taken = min(remaining, room)
            elements += taken
            blocks += -(-taken // _CHUNK)
            remaining -= taken
            if blocks == _MAX_BLOCKS or (tensors == most and not remaining):
                yield _Launch(elements, tensors)
                elements = blocks = 0
                tensors = 1 if remaining else 0
    if elements:
        yield _Launch(elements, tensors)


def _list_kinds() -> dict[str, str]:
    table = {}
    for kind, names in _FOREACH.items():
        for name in names.split():
            table[f"aten::_foreach_{name}"] = kind
            table[f"aten::_foreach_{name}_"] = kind
    return table


_KINDS = _list_kinds()
Lists = tuple[tuple[TensorSpec, ...], ...]


def _read_tensor_lists(signature: Signature, length: int) -> Lists:
    """The tensor lists of an op: arguments with as many tensors as the first."""
    if not signature.groups:
        return tuple(signature.inputs[i : i + length] for i in range(0, len(signature.inputs), length))
    return tuple(signature.tensors(name) for name, count in signature.groups if count == length)


@lowers(*_KINDS)
def lower_foreach(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The lists read, and the first of them (in place) or a new one written, chunk by chunk."""
    kind = _KINDS[signature.name]
    length = signature.groups[0][1] if signature.groups else len(signature.inputs)
    lists = _read_tensor_lists(signature, length)
    if not lists or not lists[0] or not is_on_device(lists[0][0]):
        return ()
    in_place = signature.name.endswith("_")
    written = lists[0] if in_place else (signature.outputs or lists[0])
    reads = lists[1:] if kind in ("copy", "fill") and in_place else lists
    depth = len(lists) if in_place else len(lists) + 1
    return make_multi_tensor(kind, reads, (written,), depth)


def make_multi_tensor(kind: str, reads: Lists, writes: Lists, depth: int) -> tuple[Item, ...]:
    """Chunked launches over lists of equal length; tensor by tensor where their layouts or types differ."""
    columns = list(zip(*reads, *writes, strict=True))
    if kind != "copy" and not all(_are_alike(column) for column in columns):
        return tuple(
            make_elementwise_call(kind, column[: len(reads)], column[len(reads) :])
            for column in columns
            if column[0].numel
        )
    total = sum(spec.numel for spec in writes[0])
    if not total:
        return ()
    read = sum(spec.nbytes for specs in reads for spec in specs) / total
    written = sum(spec.nbytes for specs in writes for spec in specs) / total
    compute = get_compute_type(writes[0][0])
    launches = list(split_launches([spec.numel for spec in writes[0]], depth))
    calls = {
        launch: ELEMENTWISE.call(
            kind, compute, elements=launch.elements, bytes_read=launch.elements * read,
            bytes_written=launch.elements * written, tensors=launch.tensors * depth,
        )
        for launch in set(launches)
    }  # fmt: skip
    return tuple(calls[launch] for launch in launches)


def _are_alike(column: Sequence[TensorSpec]) -> bool:
    first = column[0]
    return is_dense(first) and all(has_same_layout(first, spec) and spec.dtype == first.dtype for spec in column[1:])


@lowers(*_FUSED_WRITES, *(f"{name}_" for name in _FUSED_WRITES))
def lower_fused_optimizer(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One pass over parameters, gradients and states."""
    changed = _FUSED_WRITES[signature.name.removesuffix("_")]
    parameters = signature.tensors("self")
    named = [(name, signature.tensors(name)) for name, _ in signature.groups if name != "state_steps"]
    full = [(name, specs) for name, specs in named if len(specs) == len(parameters)]
    full = [
        (name, specs) for name, specs in full if all(s.shape == p.shape for s, p in zip(specs, parameters, strict=True))
    ]
    reads = tuple(specs for _, specs in full)
    writes = tuple(specs for name, specs in full if name in changed)
    return make_multi_tensor("optimizer", reads, writes, len(reads))


@lowers("aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_foreach_non_finite_check_and_unscale")
def lower_unscale(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Every gradient read, checked, scaled and written."""
    grads = signature.tensors("self") or signature.inputs[:-2]
    return make_multi_tensor("mul", (grads,), (grads,), 1)


@lowers("aten::_amp_update_scale_", "aten::_amp_update_scale")
def lower_update_scale(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One thread."""
    return (make_small_kernel("mul", compute="fp32"),)


@lowers("aten::_foreach_norm", "aten::_foreach_max")
def lower_foreach_norm(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Partial results per chunk, zeroed first, then one kernel that adds them up."""
    tensors = signature.inputs
    if not tensors or not is_on_device(tensors[0]):
        return ()
    chunks = max(-(-spec.numel // _CHUNK) for spec in tensors)
    partial = make_small_kernel(elements=len(tensors) * max(1, chunks), compute="fp32")
    total = sum(spec.numel for spec in tensors)
    item_bytes = sum(spec.nbytes for spec in tensors) / max(1, total)
    sums = tuple(
        ELEMENTWISE.call(
            "mul",
            get_compute_type(tensors[0]),
            elements=launch.elements,
            bytes_read=launch.elements * item_bytes,
            bytes_written=4 * -(-launch.elements // _CHUNK),
            tensors=launch.tensors,
        )
        for launch in split_launches([spec.numel for spec in tensors], 1)
    )
    return (partial, *sums, make_small_kernel("add", elements=len(tensors) * max(1, chunks), compute="fp32"))
