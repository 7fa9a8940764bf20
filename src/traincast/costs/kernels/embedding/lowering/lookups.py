"""Embedding lookups: ATen's, the table-batched kernel of the DLRM studies, and FBGEMM's with updates fused into its
backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.embedding.lowering.inputs import make_bag_scan
from traincast.costs.kernels.embedding.physics import Tables, guess_longest_bag, make_pooled_tables, make_uniform_tables
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    find_operand,
    get_compute_type,
    lowers,
    read_integer_argument,
    require_operand,
)
from traincast.costs.kernels.streaming import REDUCTION
from traincast.costs.kernels.streaming.launches import make_fill_kernel, make_small_kernel
from traincast.costs.kernels.streaming.lowering.index import count_index_bits, make_index_call, make_radix_sort
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.models.embeddings.access import Uniform, parse_access
from traincast.models.embeddings.table import FIELDS as LOAD_FIELDS
from traincast.utils.errors import TraincastError

_LARGEST_INDEX = (1 << 63) - 1  # `_coalesce` sorts every bit of its 64-bit keys
_WHOLE_ROWS_SINCE = (2, 8)  # from here on ATen's index_select copies whole rows, 16 bytes per thread
_FEATURE_KERNEL_INDICES = 3072  # up to here ATen's dense backward needs no sort


def _make_one_table(
    batch: int, weight_rows: int, dim: int, indices: TensorSpec, item_bytes: int, weighted: bool = False
) -> Tables:
    return make_uniform_tables(
        batch=batch,
        lookups=indices.numel,
        rows=(weight_rows,),
        dims=(dim,),
        index_bytes=indices.itemsize,
        row_item_bytes=item_bytes,
        weighted=weighted,
    )


@lowers("aten::embedding")
def lower_embedding(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One gather of rows."""
    weight, indices = require_operand(signature, "weight", 0), require_operand(signature, "indices", 1)
    table = _make_one_table(indices.numel, weight.shape[0], weight.shape[1], indices, weight.itemsize)
    kind = "row_gather" if context.framework_version >= _WHOLE_ROWS_SINCE else "lookup_forward"
    return (table.call(kind, get_compute_type(weight)),) if indices.numel else ()


@lowers("aten::embedding_dense_backward", "aten::embedding_backward")
def lower_embedding_dense_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros the size of the table, a sort of the indices unless they are few, and the sums of equal rows."""
    indices, result = require_operand(signature, "indices", 1), signature.outputs[0]
    table = _make_one_table(indices.numel, result.shape[0], result.shape[1], indices, result.itemsize)
    return make_dense_backward(table, indices, result)


def make_dense_backward(table: Tables, indices: TensorSpec, result: TensorSpec) -> tuple[Item, ...]:
    """The launches of a dense gradient of these lookups."""
    main = table.call("lookup_backward_dense", get_compute_type(result))
    if indices.numel <= _FEATURE_KERNEL_INDICES:
        return (make_fill_kernel(result), main)
    segments = _make_sorted_segments(indices.numel, int(table.distinct), indices.itemsize, result.shape[0])
    return (make_fill_kernel(result), *segments, main)


def _make_sorted_segments(count: int, segments: int, index_bytes: int, rows: int) -> tuple[Item, ...]:
    """ATen's preparation of a dense gradient: positions, a sort, and where the runs of equal indices start."""
    positions = make_small_kernel(elements=count, compute="int64", item_bytes=8)
    runs = make_index_call("gather", count, 1, 8, 8 * count, "int64")
    offsets = tuple(make_small_kernel("add", elements=segments, compute="int64", item_bytes=8) for _ in range(3))
    return (positions, *make_radix_sort(count, count_index_bits(rows), index_bytes, index_bytes), runs, *offsets)


@lowers("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::embedding_bag")
def lower_embedding_bag(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel, a bag of rows per result."""
    weight, indices = require_operand(signature, "weight", 0), require_operand(signature, "indices", 1)
    weighted = bool(signature.tensors("per_sample_weights"))
    bags = signature.outputs[0].shape[0]
    table = _make_one_table(bags, weight.shape[0], weight.shape[1], indices, weight.itemsize, weighted)
    return (table.call("bag_forward", get_compute_type(weight)),)


@lowers("aten::_embedding_bag_dense_backward", "aten::_embedding_bag_backward")
def lower_embedding_bag_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros the size of the table, a sort of the indices, and the sums of equal rows; or, where the layer asked for it,
    a sparse gradient."""
    if signature.scalar("sparse") is True:
        return lower_embedding_bag_sparse_backward(signature, context)
    grad, indices, result = signature.inputs[0], require_operand(signature, "indices", 1), signature.outputs[0]
    table = _make_one_table(grad.shape[0], result.shape[0], result.shape[-1], indices, result.itemsize)
    segments = _make_sorted_segments(indices.numel, int(table.distinct), indices.itemsize, result.shape[0])
    return (make_fill_kernel(result), *segments, table.call("bag_backward_dense", get_compute_type(grad)))


@lowers("aten::_embedding_bag_sparse_backward", "aten::embedding_sparse_backward")
def lower_embedding_bag_sparse_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient of each bag repeated for each of its rows; the indices are kept as they are."""
    grad, indices = signature.inputs[0], require_operand(signature, "indices", 1)
    dim = grad.shape[-1]
    return (make_index_call("gather", indices.numel * dim, dim, grad.itemsize, indices.nbytes, get_compute_type(grad)),)


@lowers("aten::_embedding_bag_per_sample_weights_backward")
def lower_per_sample_weights_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A dot product of row and gradient for each lookup."""
    grad, weight, indices = signature.inputs[:3]
    table = _make_one_table(grad.shape[0], weight.shape[0], weight.shape[1], indices, weight.itemsize)
    return (table.call("bag_forward", get_compute_type(grad)),)


@lowers("aten::_coalesce", "aten::coalesce")
def lower_coalesce(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A sparse gradient made unique: sort the indices, find the runs, add the values of equal ones."""
    indices, values = signature.inputs[:2]
    stored = indices.shape[-1]
    add = make_index_call(
        "gather", values.numel, prod(values.shape[1:]), values.itemsize, indices.nbytes, get_compute_type(values)
    )
    return (*_make_sorted_segments(stored, stored, indices.itemsize, _LARGEST_INDEX), add)


@lowers("aten::sparse_mask")
def lower_sparse_mask(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The rows of a dense tensor at the places of a sparse one."""
    indices, values = signature.tensors("mask")[:2]
    run = values.numel // max(1, indices.shape[-1])
    return (make_index_call("gather", values.numel, run, values.itemsize, indices.nbytes, get_compute_type(values)),)


def read_integers(value: Scalar) -> tuple[int, ...]:
    """The integers of a list argument."""
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()


def _read_study_tables(
    signature: Signature, weights: TensorSpec, indices: TensorSpec, batch: int, tables: int
) -> Tables:
    """Tables of the table-batched kernel. The DLRM code that it comes with draws every bag sorted."""
    if signature.scalar("load") is not None:
        return read_described_tables(signature, weights, indices, batch, False)
    tables = len(read_integers(signature.scalar("rows"))) or tables  # of a result some columns may be constants
    several = indices.numel > batch * tables
    return replace(read_batched_tables(signature, weights, indices, batch, tables, False), ascending=several)


def read_batched_tables(
    signature: Signature, weights: TensorSpec, indices: TensorSpec, batch: int, tables: int, weighted: bool
) -> Tables:
    """Tables from the scalars `rows` and `dims`; equal tables share the weights where those are not given.

    `pooling` (lookups per sample) and `access` say how tables differ; without, they share the lookups evenly and rows
    are accessed alike.
    """
    dims = read_integers(signature.scalar("dims")) or (weights.shape[-1],) * tables
    rows = read_integers(signature.scalar("rows"))
    if len(rows) != tables:
        rows = (max(1, round(weights.numel / (sum(dims) / len(dims)) / tables)),) * tables
    pooling, access = read_numbers(signature.scalar("pooling")), read_texts(signature.scalar("access"))
    return make_pooled_tables(
        batch=batch,
        pooling=pooling if len(pooling) == tables else (indices.numel / max(1, batch * tables),) * tables,
        access=tuple(parse_access(text) for text in access) if len(access) == tables else (Uniform(),) * tables,
        rows=rows,
        dims=dims if len(dims) == tables else (sum(dims) / len(dims),) * tables,
        index_bytes=indices.itemsize,
        row_item_bytes=weights.itemsize,
        weighted=weighted,
    )


def read_numbers(value: Scalar) -> tuple[float, ...]:
    """The numbers of a list argument; means over samples are fractions."""
    return tuple(item for item in value if isinstance(item, int | float)) if isinstance(value, tuple) else ()


def read_texts(value: Scalar) -> tuple[str, ...]:
    """The texts of a list argument."""
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, tuple) else ()


def read_described_tables(
    signature: Signature, weights: TensorSpec, indices: TensorSpec, batch: int, weighted: bool
) -> Tables:
    """Tables whose load the op itself says."""
    longest, rows, host = (read_integer_argument(signature, name) for name in ("longest_bag", "total_rows", "host"))
    load = tuple(float(value) for value in read_integers(signature.scalar("load")))
    _check_load(load)
    return Tables(
        batch=batch,
        load=load,
        rows=rows,
        longest_bag=longest,
        index_bytes=indices.itemsize,
        row_item_bytes=weights.itemsize,
        weighted=weighted,
        host=host,
    )


def _check_load(load: tuple[float, ...]) -> None:
    """Rejects a load whose numbers contradict each other, up to their rounding by table."""
    if len(load) != len(LOAD_FIELDS):
        raise TraincastError(f"its load has {len(load)} numbers, not {len(LOAD_FIELDS)}")
    sums = dict(zip(LOAD_FIELDS, load, strict=True))
    for part, whole_sum in (("distinct_rows", "lookups"), ("long_rows", "distinct_rows"), ("long_lookups", "lookups")):
        if sums[part] > sums[whole_sum] + sums["tables"]:
            raise TraincastError(f"its load has {sums[part]:g} {part}, more than its {sums[whole_sum]:g} {whole_sum}")


@lowers("traincast::batched_embedding_forward")
def lower_batched_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all tables."""
    weights, indices = require_operand(signature, "weights", 0), require_operand(signature, "indices", 2)
    tables = _read_study_tables(signature, weights, indices, *signature.outputs[0].shape[:2])
    return (tables.call("batched_forward", get_compute_type(weights)),)


@lowers("traincast::batched_embedding_backward_sgd")
def lower_batched_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that updates the rows of all tables in place."""
    weights, indices = require_operand(signature, "weights", 1), require_operand(signature, "indices", 3)
    tables = _read_study_tables(signature, weights, indices, *require_operand(signature, "grad", 0).shape[:2])
    return (tables.call("batched_backward_sgd", get_compute_type(weights)),)


@lowers("fbgemm::bounds_check_indices")
def lower_bounds_check(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that walks through every bag and seldom writes."""
    indices, offsets = require_operand(signature, "indices", 1), require_operand(signature, "offsets", 2)
    return (make_bag_scan(indices, max(1, offsets.numel)),)


_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
_TBE_FORWARD = (
    {
        f"fbgemm::split_embedding_codegen_forward_{weighted}_{suffix}": weighted == "weighted"
        for weighted in ("weighted", "unweighted")
        for suffix in ("cuda", "pt2_cuda", "pt2_wrapper", "v2_cuda")
    }
    | {
        f"fbgemm::dense_embedding_codegen_forward_{weighted}_cuda": weighted == "weighted"
        for weighted in ("weighted", "unweighted")
    }
    | {
        f"fbgemm::split_embedding_codegen_lookup_{name}_function{suffix}": False
        for name in _OPTIMIZERS
        for suffix in ("", "_pt2")
    }
)
_TBE_BACKWARD = {
    f"fbgemm::split_embedding_backward_codegen_{name}_{weighted}_exact_{suffix}": (name, weighted == "weighted")
    for name in (*_OPTIMIZERS, "dense")
    for weighted in ("weighted", "unweighted")
    for suffix in ("cuda", "pt2_cuda", "pt2_wrapper")
}


def _find_tbe_weights(signature: Signature) -> TensorSpec:
    return find_operand(signature, "dev_weights", 0) or find_operand(signature, "weights", 0) or signature.inputs[0]


def _read_tbe_tables(signature: Signature, samples: Sequence[int], weighted: bool) -> Tables:
    """FBGEMM's tables: `samples` is the shape of the pooled result or its gradient, [batch, sum of dims]; of one
    dimension where features have batches of their own, of which the mean is taken."""
    indices, offsets = require_operand(signature, "indices", 0), require_operand(signature, "offsets", 0)
    dims = read_integers(signature.scalar("dims"))
    batch = max(1, (offsets.numel - 1) // len(dims)) if dims and len(samples) == 1 else samples[0]
    if signature.scalar("load") is not None:
        return read_described_tables(signature, _find_tbe_weights(signature), indices, batch, weighted)
    tables = max(1, (offsets.numel - 1) // max(1, batch))
    if not dims:
        dims = (samples[-1] // tables,) * tables
        signature = Signature(
            signature.name, signature.inputs, signature.outputs, (*signature.scalars, ("dims", dims)), signature.groups
        )
    batched = read_batched_tables(signature, _find_tbe_weights(signature), indices, batch, tables, weighted)
    batched = replace(batched, host=read_integer_argument(signature, "host"))
    if signature.scalar("pooling") is not None:
        return batched
    return replace(batched, longest_bag=guess_longest_bag(batch, tables, indices.numel))


@lowers(*_TBE_FORWARD)
def lower_tbe_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all tables."""
    weighted = _TBE_FORWARD[signature.name] or bool(signature.tensors("indice_weights"))
    tables = _read_tbe_tables(signature, signature.outputs[0].shape, weighted)
    return (tables.call("tbe_forward", get_compute_type(_find_tbe_weights(signature))),)


@lowers("fbgemm::split_embedding_codegen_grad_indice_weights_cuda")
def lower_tbe_weight_gradient(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The product of every row looked up with its bag's gradient: the rows are read as by the lookup."""
    grad = require_operand(signature, "grad_output", 0)
    tables = _read_tbe_tables(signature, grad.shape, weighted=True)
    return (tables.call("tbe_forward", get_compute_type(_find_tbe_weights(signature))),)


@lowers(*_TBE_BACKWARD)
def lower_tbe_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Linearise and sort the indices, find their runs, update each row once (`dense`: its gradient, after zeros)."""
    optimizer, weighted = _TBE_BACKWARD[signature.name]
    grad = signature.tensors("grad_output") or signature.inputs[:1]
    tables = _read_tbe_tables(signature, grad[0].shape, weighted)
    main = tables.call(f"tbe_backward_{optimizer}", get_compute_type(_find_tbe_weights(signature)))
    zeros = (make_fill_kernel(signature.outputs[0]),) if optimizer == "dense" and signature.outputs else ()
    return (*zeros, *lower_tbe_preparation(tables), main)


def lower_tbe_preparation(tables: Tables) -> tuple[Item, ...]:
    """The launches before the update kernels, in the order of FBGEMM's backward."""
    count = tables.lookups
    bits = count_index_bits(int(tables.rows))
    linear = make_index_call("gather", count, 1, 8, count * tables.index_bytes, "int64")
    weights: tuple[Item, ...] = ()
    if tables.weighted:
        weights = make_radix_sort(count, bits, 8, 4)
    return (
        linear,
        *make_radix_sort(count, bits, 8, 4),
        make_small_kernel(elements=count),
        make_small_kernel(),
        make_small_kernel(),
        _make_pass_over(count, read_bytes=8, written_bytes=0),
        make_small_kernel(),
        make_small_kernel(),
        _make_pass_over(count, read_bytes=4, written_bytes=4),
        *weights,
        make_small_kernel(),
        _make_pass_over(count, read_bytes=4, written_bytes=0),
    )


def _make_pass_over(count: int, *, read_bytes: int, written_bytes: int) -> KernelCall:
    """Run-length encoding, a prefix sum, or the search for long runs: one pass over the sorted indices."""
    return REDUCTION.call(
        "inner",
        "int32",
        elements=count,
        outputs=count,
        bytes_read=count * read_bytes,
        bytes_written=count * written_bytes,
    )
