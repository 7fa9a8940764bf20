"""NVIDIA's kernels for the dot products between the embeddings of a sample."""

from __future__ import annotations

from traincast.kernels.registry import Item, LoweringContext, lowers
from traincast.kernels.streaming.launches import elementwise
from traincast.workload.ops import Signature


@lowers("nvidia::dot_based_interact", "nvidia::dot_based_interact_backward")
def interact(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that has a sample's vectors in shared memory: what it reads and writes once is its time."""
    return (elementwise("mul", signature.inputs, signature.outputs),)
