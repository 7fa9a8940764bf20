"""Embedding ops of NVIDIA's HugeCTR and of TensorFlow: indices, interactions, updates."""

from __future__ import annotations

from traincast.costs.kernels.embedding.lowering.inputs import make_moved_elements, make_prefix_sum
from traincast.costs.kernels.embedding.lowering.lookups import read_described_tables
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    get_compute_type,
    lowers,
    read_integer_argument,
    require_operand,
)
from traincast.costs.kernels.streaming import ELEMENTWISE, INDEX
from traincast.costs.kernels.streaming.launches import (
    STREAM_SYNCHRONIZE,
    make_elementwise_call,
    make_fill_kernel,
    make_memcpy,
    make_small_kernel,
)
from traincast.costs.kernels.streaming.lowering.index import make_index_call, make_radix_sort
from traincast.ir.ops import Signature

_COUNT_TO_HOST = (make_memcpy("d2h_pageable", 8), STREAM_SYNCHRONIZE)


@lowers("hugectr::index_calculation")
def index_calculation(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A sort of the keys with their places, and where the runs of equal ones begin."""
    keys = require_operand(signature, "keys", 0)
    if not keys.numel:
        return ()
    sorted_keys = make_radix_sort(keys.numel, read_integer_argument(signature, "bits", 32), keys.itemsize, 4)
    return (*sorted_keys, make_small_kernel(elements=keys.numel), make_small_kernel(elements=keys.numel))


@lowers("hugectr::update_adagrad")
def update_adagrad(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Gradients summed by row in the order of the sort and written; then read, and each row and its state updated."""
    grad, weights = require_operand(signature, "grad_output", 0), require_operand(signature, "weights", 1)
    indices = require_operand(signature, "indices", 2)
    tables = read_described_tables(signature, weights, indices, grad.shape[0], False)
    if not indices.numel:
        return ()
    sums = round(tables.distinct) * weights.shape[-1]
    written = ELEMENTWISE.call(
        "copy", "fp32", elements=sums, bytes_read=4 * sums, bytes_written=4 * sums, tensors=2
    )  # fmt: skip
    return (written, tables.call("tbe_backward_adagrad", get_compute_type(weights)))


@lowers("hugectr::hybrid_indices")
def hybrid_indices(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Which keys of the whole batch (`keys`) want infrequent rows of this GPU, and which of its own samples (`local`)
    want frequent ones: where the row of each key is is read at random, then keys are selected. Between nodes a mask
    of its own keys for every GPU; on one node masks of frequent rows."""
    keys, local = require_operand(signature, "keys", 0), require_operand(signature, "local", 1)
    gpus, frequent = read_integer_argument(signature, "gpus", 1), read_integer_argument(signature, "frequent", 0)
    numbered = ELEMENTWISE.call(
        "copy", "int32", elements=keys.numel, bytes_read=keys.nbytes, bytes_written=keys.nbytes, tensors=2
    )  # fmt: skip
    items = (numbered, *_selected_at_random(keys.numel), *_selected_at_random(local.numel))
    if read_integer_argument(signature, "nodes", 1) > 1:
        mask = make_small_kernel("copy", elements=gpus * local.numel, compute="int8", item_bytes=1)
        return (*items, _where(local.numel), mask, *_selected(gpus * local.numel))
    masks = (make_memcpy("memset", max(1, 2 * frequent)), _where(keys.numel))
    return (*items, *masks, *_selected(max(1, frequent)), *_selected(max(1, frequent)), make_small_kernel())


def _where(keys: int) -> Item:
    """Where rows are, read at random for this many keys."""
    return make_index_call("gather", keys, 1, 4, 4 * keys, "int32")


def _selected(elements: int) -> tuple[Item, ...]:
    """CUB's select: its state, one sweep, and where the parts of every GPU begin."""
    return (make_small_kernel(), make_small_kernel("copy", elements=elements), make_small_kernel())


def _selected_at_random(keys: int) -> tuple[Item, ...]:
    return (make_small_kernel(), _where(keys), make_small_kernel())


@lowers(
    "nvidia::dot_based_interact", "nvidia::dot_based_interact_backward", "hugectr::cross", "hugectr::cross_backward"
)  # fmt: skip
def interact(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that has a sample's vectors in shared memory or registers: what it reads and writes is its time."""
    return (make_elementwise_call("mul", signature.inputs, signature.outputs),)


@lowers("tensorflow::unique")
def unique(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Values once each in order of first appearance: sort, mark, number, sort again by place, and number all anew."""
    values, distinct = signature.inputs[0], signature.outputs[0]
    return (
        make_small_kernel(elements=values.numel),
        *make_radix_sort(values.numel, 8 * values.itemsize, values.itemsize, 4),
        *make_prefix_sum(values),
        *_COUNT_TO_HOST,
        make_moved_elements(distinct, 1),
        *make_radix_sort(distinct.numel, 32, 4, 4),
        make_moved_elements(distinct, 1),
        make_moved_elements(signature.outputs[1], 1),
    )


@lowers("tensorflow::unsorted_segment_sum")
def segment_sum(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then rows added to where their number says, with atomics; `longest_bag` counts those of the hottest."""
    values, numbers, result = signature.inputs[0], signature.inputs[1], signature.outputs[0]
    table = read_described_tables(signature, values, numbers, values.shape[0], False)
    return (make_fill_kernel(result), table.call("row_sums", get_compute_type(values)))


@lowers("tensorflow::resource_sparse_apply_adagrad")
def sparse_apply_adagrad(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Rows of the table and of its accumulator read and written at random places, gradients read in order."""
    grad, indices = signature.inputs[:2]
    call = INDEX.call(
        "scatter", get_compute_type(grad), elements=grad.numel, row_elements=grad.shape[-1],
        bytes_read=3 * grad.nbytes + indices.nbytes, bytes_written=2 * grad.nbytes,
    )  # fmt: skip
    return (call,)
