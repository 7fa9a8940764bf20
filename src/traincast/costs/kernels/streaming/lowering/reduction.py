"""Reductions over dimensions, scans, and pooling over windows."""

from __future__ import annotations

from math import prod

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.operands import (
    choose_reduction_kind,
    count_real_bytes,
    get_compute_type,
    is_on_device,
    list_read_operands,
    make_aten_names,
    read_integer_sizes,
    sum_real_bytes,
)
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import POOL, REDUCTION
from traincast.costs.kernels.streaming.launches import make_fill_kernel, make_iterated_call, make_reduction_call
from traincast.ir.ops import Scalar, Signature, TensorSpec

_REDUCTIONS = """
    sum mean max min amax amin aminmax all any prod argmax argmin norm linalg_vector_norm var std var_mean std_mean
    logsumexp nansum count_nonzero median nanmedian mode sum_to_size linalg_norm frobenius_norm nanmean
"""
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
    """One kernel; `max` and `min` of two tensors are element-wise."""
    source = signature.inputs[0]
    outputs = [spec for spec in signature.outputs if is_on_device(spec)]
    if not outputs or not source.numel:
        return ()
    if signature.tensors("other"):
        return (make_iterated_call("add", list_read_operands(signature), outputs),)
    kind = choose_reduction_kind(source, _read_dims(signature.scalar("dim")))
    if kind == "full" and max(spec.numel for spec in outputs) > 1:
        kind = "inner"
    return (make_reduction_call(kind, source, outputs),)


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
