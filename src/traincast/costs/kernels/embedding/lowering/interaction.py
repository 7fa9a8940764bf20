"""NVIDIA's kernels between the embeddings of a sample: dot products, and the element-wise part of cross layers."""

from __future__ import annotations

from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming.launches import elementwise
from traincast.ir.ops import Signature


@lowers(
    "nvidia::dot_based_interact", "nvidia::dot_based_interact_backward", "hugectr::cross", "hugectr::cross_backward"
)  # fmt: skip
def interact(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that has a sample's vectors in shared memory or registers: what it reads and writes is its time."""
    return (elementwise("mul", signature.inputs, signature.outputs),)
