"""Sharded data parallelism (`fully_shard`): packing shards into one message and whole parameters out of it."""

from __future__ import annotations

from traincast.costs.kernels.operands import compute_of, total_bytes
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import COPY
from traincast.ir.ops import Signature

# The tensors that each op moves, once read and once written; its other tensor is the buffer on the other side.
_MOVED = {
    "fsdp::all_gather_copy_in": "all_gather_inputs",
    "fsdp::split_with_sizes_copy": "out",
    "fsdp::chunk_cat": "tensors",
}


@lowers(*_MOVED)
def pack(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all parameters of a layer."""
    moved = [spec for spec in signature.tensors(_MOVED[signature.name]) if spec.numel]
    if not moved:
        return ()
    nbytes = total_bytes(moved)
    elements = sum(spec.numel for spec in moved)
    call = COPY.call(
        "cat", compute_of(moved[0]), elements=elements, bytes_read=nbytes, bytes_written=nbytes, tensors=len(moved)
    )
    return (call,)
