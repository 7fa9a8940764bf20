"""What FBGEMM and TorchRec do to row numbers before a lookup: re-order, deal out to ranks, add up, fill caches."""

from __future__ import annotations

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.embedding.physics import make_fill_call
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    get_compute_type,
    lowers,
    read_integer_argument,
    require_operand,
)
from traincast.costs.kernels.streaming import INDEX, REDUCTION
from traincast.costs.kernels.streaming.launches import make_fill_kernel, make_small_kernel
from traincast.costs.kernels.streaming.lowering.index import count_index_bits, make_index_call, make_radix_sort
from traincast.ir.ops import Signature, TensorSpec
from traincast.models.embeddings.access import Uniform

_WAYS = 32  # rows of a set of FBGEMM's cache


def make_prefix_sum(spec: TensorSpec) -> tuple[Item, ...]:
    """CUB's prefix sum: a kernel that sets up, and one pass."""
    call = REDUCTION.call(
        "inner", get_compute_type(spec), elements=spec.numel, outputs=spec.numel, bytes_read=spec.nbytes,
        bytes_written=spec.nbytes,
    )  # fmt: skip
    return (make_small_kernel(), call)


def make_moved_elements(spec: TensorSpec, run: int) -> KernelCall:
    """Elements copied in runs from one place to another."""
    return make_index_call("gather", spec.numel, max(1, run), spec.itemsize, 0, get_compute_type(spec))


def make_bag_scan(spec: TensorSpec, bags: int) -> KernelCall:
    """A pass over bags by a warp each, most of whose time are loads that wait for each other: where the bag begins and
    what is in it."""
    elements = max(spec.numel, bags)
    return INDEX.call(
        "put", get_compute_type(spec), elements=elements, row_elements=max(1, elements // bags), bytes_read=spec.nbytes,
        bytes_written=spec.nbytes,
    )  # fmt: skip


@lowers("fbgemm::asynchronous_complete_cumsum", "fbgemm::asynchronous_inclusive_cumsum")
def lower_complete_cumsum(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A prefix sum with a zero in front."""
    return (make_small_kernel(), *make_prefix_sum(signature.inputs[0]))


@lowers("fbgemm::permute_2D_sparse_data", "fbgemm::permute_1D_sparse_data", "fbgemm::permute_sparse_features")
def lower_permute(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Lengths in another order, where bags start before and after, and the bags themselves."""
    if not signature.outputs:
        return ()
    lengths, *moved = signature.outputs
    before = require_operand(signature, "lengths", 0)
    bags = max(1, lengths.numel)
    return (
        make_moved_elements(lengths, 1),
        *make_prefix_sum(before),
        *make_prefix_sum(lengths),
        *(make_bag_scan(spec, bags) for spec in moved if spec.numel),
    )


@lowers(
    "fbgemm::permute_pooled_embs", "fbgemm::permute_pooled_embs_split", "fbgemm::permute_duplicate_pooled_embs",
    "fbgemm::permute_duplicate_pooled_embs_split", "fbgemm::permute_multi_embedding",
    "fbgemm::permute_sequence_embeddings",
)  # fmt: skip
def lower_permute_embeddings(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Embeddings in another order: one kernel that reads and writes each, column blocks in runs."""
    made = [spec for spec in signature.outputs if spec.numel]
    blocks = max(1, require_operand(signature, "permute_list", 2).numel) if signature.tensors("permute_list") else 1
    return tuple(make_moved_elements(spec, spec.shape[-1] // blocks) for spec in made)


@lowers("fbgemm::block_bucketize_sparse_features")
def lower_bucketize(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Counts the row numbers of every bag by rank, adds up, and deals them out one by one."""
    lengths, *dealt = signature.outputs
    values = require_operand(signature, "indices", 1)
    count = REDUCTION.call(
        "inner", get_compute_type(values), elements=values.numel, outputs=lengths.numel, bytes_read=values.nbytes,
        bytes_written=lengths.nbytes,
    )  # fmt: skip
    return (
        *make_prefix_sum(require_operand(signature, "lengths", 0)),
        count,
        *make_prefix_sum(lengths),
        *(make_moved_elements(spec, 1) for spec in dealt),
    )


@lowers(
    "fbgemm::jagged_to_padded_dense_forward", "fbgemm::jagged_to_padded_dense_backward",
    "fbgemm::dense_to_jagged_forward",
)  # fmt: skip
def lower_jagged(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Rows of all sequences moved to where they are padded, or back: whole rows, one kernel."""
    (result,) = signature.outputs
    return (make_moved_elements(result, result.shape[-1]),) if result.numel else ()


@lowers("fbgemm::keyed_jagged_index_select_dim1")
def lower_segments(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Lengths of the segments picked, where each begins, and what is in them, in runs."""
    values, lengths, *weights = signature.outputs
    run = values.numel // max(1, lengths.numel)
    moved = (make_moved_elements(spec, run) for spec in (values, *weights) if spec.numel)
    return (make_moved_elements(lengths, 1), *make_prefix_sum(lengths), *moved)


@lowers("fbgemm::batch_index_select_dim0")
def lower_batch_select(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Rows of several tables, whole, in one kernel."""
    (result,), indices = signature.outputs, require_operand(signature, "indices", 1)
    return (make_moved_elements(result, result.numel // max(1, indices.numel)),) if result.numel else ()


@lowers("fbgemm::batch_index_select_dim0_backward")
def lower_batch_select_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, a sort of the row numbers, and gradients added up by row: as FBGEMM's lookups go back."""
    grad, indices = require_operand(signature, "grad_output", 0), require_operand(signature, "indices", 1)
    run = max(1, grad.numel // max(1, indices.numel))
    bits = count_index_bits(max(1, signature.outputs[0].numel // run))
    return (
        make_fill_kernel(signature.outputs[0]),
        *make_radix_sort(indices.numel, bits, 8, 4),
        make_moved_elements(grad, run),
    )


@lowers("fbgemm::segment_sum_csr", "fbgemm::invert_permute")
def lower_short_passes(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One pass over lengths or an order."""
    (last,) = signature.inputs[-1:]
    return (make_moved_elements(last, 1),)


@lowers("fbgemm::linearize_cache_indices")
def lower_linearize(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Row numbers counted on through all tables."""
    return (make_moved_elements(require_operand(signature, "indices", 0), 1),)


@lowers("fbgemm::lxu_cache_lookup")
def lower_cache_lookup(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A warp compares each row number with the ways of its set: 8 bytes per way."""
    indices = signature.inputs[0]
    ways = signature.scalar("ways", _WAYS)
    return (_make_compare_tags(indices.numel, ways if isinstance(ways, int) else _WAYS),)


def _make_compare_tags(rows: int, ways: int) -> KernelCall:
    """The tags of a set are side by side; one place comes out."""
    return INDEX.call(
        "gather",
        "int64",
        elements=rows * ways,
        row_elements=ways,
        bytes_read=rows * 8 * (1 + ways),
        bytes_written=4 * rows,
    )


@lowers("fbgemm::lru_cache_populate")
def lower_cache_populate(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Distinct rows, which of them the cache lacks, a sort by set, and the rows themselves: both ways over PCIe."""
    indices, weights = require_operand(signature, "linear_cache_indices", 1), require_operand(signature, "weights", 0)
    nbytes, distinct = (float(read_integer_argument(signature, name)) for name in ("fetched_bytes", "unique_rows"))
    rows = read_integer_argument(signature, "total_rows") or weights.numel
    cache = signature.tensors("lxu_cache_weights")
    if not distinct and cache and len(cache[0].shape) == 2 and cache[0].numel:  # of a capture: rows accessed alike
        held, width = cache[0].shape
        rows = max(1, read_integer_argument(signature, "total_cache_hash_size") or weights.numel // width)
        distinct = Uniform().make_classes(rows).count_unique_rows(indices.numel)
        nbytes = distinct * max(0.0, 1 - held / rows) * width * cache[0].itemsize
    return make_populate_items(indices, count_index_bits(rows), round(distinct), nbytes)


def make_populate_items(indices: TensorSpec, bits: int, distinct: int, fetched_bytes: float) -> tuple[Item, ...]:
    """The launches that fill FBGEMM's cache for these row numbers, of which this many bits and `distinct` rows
    differ."""
    return (
        *make_radix_sort(indices.numel, bits, 8, 8),
        *make_prefix_sum(indices),
        _make_compare_tags(distinct, _WAYS),
        *make_radix_sort(distinct, 32, 4, 8),
        make_fill_call(indices.numel, fetched_bytes),
    )
