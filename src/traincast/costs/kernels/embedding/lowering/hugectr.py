"""HugeCTR's embeddings. Of its collection keys are sorted beside the step before, the update alone is in a step's way;
its hybrid embedding found in the step itself, at first, which rows are whose."""

from __future__ import annotations

from traincast.costs.kernels.embedding.lowering.lookups import described_tables
from traincast.costs.kernels.operands import compute_of, required, whole
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.costs.kernels.streaming.launches import memcpy, small_kernel
from traincast.costs.kernels.streaming.lowering.index import index_call, radix_sort
from traincast.ir.ops import Signature


@lowers("hugectr::index_calculation")
def index_calculation(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A sort of the keys with their places, and where the runs of equal ones begin."""
    keys = required(signature, "keys", 0)
    if not keys.numel:
        return ()
    sorted_keys = radix_sort(keys.numel, whole(signature, "bits", 32), keys.itemsize, 4)
    return (*sorted_keys, small_kernel(elements=keys.numel), small_kernel(elements=keys.numel))


@lowers("hugectr::update_adagrad")
def update_adagrad(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Gradients summed by row in the order of the sort and written; then read, and each row and its state updated."""
    grad, weights = required(signature, "grad_output", 0), required(signature, "weights", 1)
    indices = required(signature, "indices", 2)
    tables = described_tables(signature, weights, indices, grad.shape[0], False)
    if not indices.numel:
        return ()
    sums = round(tables.distinct) * weights.shape[-1]
    written = ELEMENTWISE.call(
        "copy", "fp32", elements=sums, bytes_read=4 * sums, bytes_written=4 * sums, tensors=2
    )  # fmt: skip
    return (written, tables.call("tbe_backward_adagrad", compute_of(weights)))


@lowers("hugectr::hybrid_indices")
def hybrid_indices(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Which keys of the whole batch (`keys`) want infrequent rows of this GPU, and which of its own samples (`local`)
    want frequent ones: where the row of each key lies is read at random, then keys are selected. Between nodes a mask
    of its own keys for every GPU; on one node masks of frequent rows."""
    keys, local = required(signature, "keys", 0), required(signature, "local", 1)
    gpus, frequent = whole(signature, "gpus", 1), whole(signature, "frequent", 0)
    numbered = ELEMENTWISE.call(
        "copy", "int32", elements=keys.numel, bytes_read=keys.nbytes, bytes_written=keys.nbytes, tensors=2
    )  # fmt: skip
    items = (numbered, *_selected_at_random(keys.numel), *_selected_at_random(local.numel))
    if whole(signature, "nodes", 1) > 1:
        mask = small_kernel("copy", elements=gpus * local.numel, compute="int8", item_bytes=1)
        return (*items, _where(local.numel), mask, *_selected(gpus * local.numel))
    masks = (memcpy("memset", max(1, 2 * frequent)), _where(keys.numel))
    return (*items, *masks, *_selected(max(1, frequent)), *_selected(max(1, frequent)), small_kernel())


def _where(keys: int) -> Item:
    """Where rows lie, read at random for so many keys."""
    return index_call("gather", keys, 1, 4, 4 * keys, "int32")


def _selected(elements: int) -> tuple[Item, ...]:
    """CUB's select: its state, one sweep, and where the parts of every GPU begin."""
    return (small_kernel(), small_kernel("copy", elements=elements), small_kernel())


def _selected_at_random(keys: int) -> tuple[Item, ...]:
    return (small_kernel(), _where(keys), small_kernel())
