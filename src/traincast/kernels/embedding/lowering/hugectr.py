"""HugeCTR's embedding collection: keys are sorted beside the step before, the update alone is in a step's way."""

from __future__ import annotations

from traincast.kernels.embedding.lowering.lookups import described_tables
from traincast.kernels.operands import compute_of, required, whole
from traincast.kernels.registry import Item, LoweringContext, lowers
from traincast.kernels.streaming import ELEMENTWISE
from traincast.kernels.streaming.launches import small_kernel
from traincast.kernels.streaming.lowering.index import radix_sort
from traincast.workload.ops import Signature


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
