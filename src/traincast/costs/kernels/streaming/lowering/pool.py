"""Pooling and resampling of images."""

from __future__ import annotations

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.operands import compute_of, ints, product, total_bytes
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import POOL
from traincast.costs.kernels.streaming.launches import fill, reduction
from traincast.ir.ops import Signature, TensorSpec

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
    return product(ints(signature.scalar("kernel_size"), len(signature.inputs[0].shape) - 2, 1))


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
    if product(result.shape[2:]) == 1 and "avg" in signature.name:
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
