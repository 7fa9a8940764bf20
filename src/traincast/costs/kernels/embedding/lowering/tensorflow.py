"""TensorFlow's sparse gradients: rows made unique by sorts, summed, and applied, an op at a time."""

from __future__ import annotations

from traincast.costs.kernels.embedding.lowering.inputs import moved_elements, prefix_sum
from traincast.costs.kernels.embedding.lowering.lookups import described_tables
from traincast.costs.kernels.operands import compute_of
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import INDEX
from traincast.costs.kernels.streaming.launches import STREAM_SYNCHRONIZE, fill, memcpy, small_kernel
from traincast.costs.kernels.streaming.lowering.index import radix_sort
from traincast.ir.ops import Signature

_COUNT_TO_HOST = (memcpy("d2h_pageable", 8), STREAM_SYNCHRONIZE)


@lowers("tensorflow::unique")
def unique(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Values once each in order of first appearance: sort, mark, number, sort again by place, and number all anew."""
    values, distinct = signature.inputs[0], signature.outputs[0]
    return (
        small_kernel(elements=values.numel),
        *radix_sort(values.numel, 8 * values.itemsize, values.itemsize, 4),
        *prefix_sum(values),
        *_COUNT_TO_HOST,
        moved_elements(distinct, 1),
        *radix_sort(distinct.numel, 32, 4, 4),
        moved_elements(distinct, 1),
        moved_elements(signature.outputs[1], 1),
    )


@lowers("tensorflow::unsorted_segment_sum")
def segment_sum(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then rows added to where their number says, with atomics; `longest_bag` counts those of the hottest."""
    values, numbers, result = signature.inputs[0], signature.inputs[1], signature.outputs[0]
    table = described_tables(signature, values, numbers, values.shape[0], False)
    return (fill(result), table.call("row_sums", compute_of(values)))


@lowers("tensorflow::resource_sparse_apply_adagrad")
def sparse_apply_adagrad(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Rows of the table and of its accumulator read and written at random places, gradients read in order."""
    grad, indices = signature.inputs[:2]
    call = INDEX.call(
        "scatter", compute_of(grad), elements=grad.numel, row_elements=grad.shape[-1],
        bytes_read=3 * grad.nbytes + indices.nbytes, bytes_written=2 * grad.nbytes,
    )  # fmt: skip
    return (call,)
