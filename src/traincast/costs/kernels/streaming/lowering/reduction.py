"""Reductions and scans over some or all dimensions."""

from __future__ import annotations

from traincast.costs.kernels.operands import (
    aten,
    compute_of,
    on_device,
    read_operands,
    real_bytes,
    reduction_kind,
    total_bytes,
)
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import REDUCTION
from traincast.costs.kernels.streaming.launches import iterated, reduction
from traincast.ir.ops import Scalar, Signature

_REDUCTIONS = """
    sum mean max min amax amin aminmax all any prod argmax argmin norm linalg_vector_norm var std var_mean std_mean
    logsumexp nansum count_nonzero median nanmedian mode sum_to_size linalg_norm frobenius_norm nanmean
"""
_SCANS = "cumsum cumsum_ cumprod cumprod_ cummax cummin logcumsumexp"


def _dims(value: Scalar) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return tuple(item for item in value if isinstance(item, int))
    return (value,) if isinstance(value, int) else ()


@lowers(*aten(_REDUCTIONS))
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


@lowers(*aten(_SCANS))
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
