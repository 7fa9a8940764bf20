"""Kernels that a compiler made of several ops (`kernels.fusion`)."""

from __future__ import annotations

from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming.launches import elementwise
from traincast.ir.ops import Signature


@lowers("inductor::fused")
def fused(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that streams what it reads and writes; rows it reduces stay on the chip meanwhile."""
    tensors = (*signature.inputs, *signature.outputs)
    return (elementwise("add", signature.inputs, signature.outputs),) if any(spec.numel for spec in tensors) else ()
