"""Reductions over dimensions, scans, and pooling over windows."""

from __future__ import annotations

from math import prod

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.operands import (
    aten_names,
    compute_of,
    integer_sizes,
    on_device,
    read_operands,
    real_bytes,
    reduction_kind,
    total_bytes,
)
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import POOL, REDUCTION
from traincast.costs.kernels.streaming.launches import fill, iterated, reduction
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


def _dims(value: Scalar) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return tuple(item for item in value if isinstance(item, int))
    return (value,) if isinstance(value, int) else ()


@lowers(*aten_names(_REDUCTIONS))
def reduce(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; `max` and `min` of two tensors are element-wise."""
    source = signature.inputs[0]
    outputs = [spec for spec in signature.outputs if on_device(spec)]
    if not outputs or not source.numel:
        return ()
    if signature.tensors("other"):
        return (iterated("add", read_operands(signature), outputs),)
    kind = reduction_kind(source, _dims(signature.scalar("dim")))
    if kind == "full" and max(spec.numel for spec in outputs) > 1:
        kind = "inner"
    return (reduction(kind, source, outputs),)


@lowers(*aten_names(_SCANS))
def scan(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A running sum: one kernel that reads and writes everything."""
    source = signature.inputs[0]
    outputs = [spec for spec in signature.outputs if on_device(spec)]
    if not outputs or not source.numel:
        return ()
    kind = reduction_kind(source, _dims(signature.scalar("dim")))
    call = REDUCTION.call(
        "inner" if kind == "full" else kind,
        compute_of(source),
        elements=source.numel,
        outputs=source.numel,
        bytes_read=real_bytes(source),
        bytes_written=total_bytes(outputs),
    )
    return (call,)


def _pool(kind: str, signature: Signature, window: int, reads: tuple[TensorSpec, ...]) -> KernelCall:
    result = signature.outputs[0]
    return POOL.call(
        kind,
        compute_of(result),
        elements=result.numel,
        window=window,
        bytes_read=total_bytes(reads),
        bytes_written=total_bytes(signature.outputs),
    )


def _window(signature: Signature) -> int:
    return prod(integer_sizes(signature.scalar("kernel_size"), len(signature.inputs[0].shape) - 2, 1))


@lowers(
    "aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "aten::avg_pool2d", "aten::avg_pool3d",
    "aten::max_pool2d", "aten::avg_pool1d",
)  # fmt: skip
def pool(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel."""
    return (_pool("forward", signature, _window(signature), signature.inputs[:1]),)


@lowers("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def max_pool_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then one kernel that reads the gradient and the stored positions."""
    reads = (signature.inputs[0], signature.inputs[-1])
    return (fill(signature.outputs[0]), _pool("backward", signature, _window(signature), reads))


@lowers("aten::avg_pool2d_backward", "aten::avg_pool3d_backward")
def avg_pool_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel."""
    return (_pool("backward", signature, _window(signature), signature.inputs[:1]),)


@lowers(*_ADAPTIVE)
def adaptive_pool(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; down to a single position it is a mean."""
    source, result = signature.inputs[0], signature.outputs[0]
    window = -(-source.numel // max(1, result.numel))
    if prod(result.shape[2:]) == 1 and "avg" in signature.name:
        return (reduction("inner", source, (result,)),)
    return (_pool("forward", signature, window, (source,)),)


@lowers(*(f"{name}_backward" for name in _ADAPTIVE))
def adaptive_pool_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then one kernel that spreads the gradient."""
    return (fill(signature.outputs[0]), _pool("backward", signature, 1, signature.inputs[:1]))


@lowers(*_UPSAMPLES)
def upsample(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; backward adds into zeros."""
    taps = _UPSAMPLES[signature.name]
    if not signature.name.endswith("_backward"):
        return (_pool("forward", signature, taps, signature.inputs[:1]),)
    return (fill(signature.outputs[0]), _pool("backward", signature, taps, signature.inputs[:1]))


@lowers("aten::grid_sampler_2d", "aten::grid_sampler_2d_backward")
def grid_sampler(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel with four taps; backward adds into zeros."""
    if signature.name.endswith("backward"):
        return (fill(signature.outputs[0]), _pool("backward", signature, 4, signature.inputs))
    return (_pool("forward", signature, 4, signature.inputs),)
