"""Embedding lookups: ATen's, the table-batched kernel of the DLRM studies, and FBGEMM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import expm1, log1p

from traincast.kernels.call import KernelCall
from traincast.kernels.families import EMBEDDING, REDUCTION
from traincast.kernels.lowering.common import (
    compute_of,
    elementwise,
    fill,
    operand,
    product,
    required,
    small_kernel,
)
from traincast.kernels.lowering.index import gather_call, index_bits, radix_sort
from traincast.kernels.registry import Item, LoweringContext, lowers
from traincast.workload.ops import Scalar, Signature, TensorSpec

_LARGEST_INDEX = (1 << 63) - 1  # `_coalesce` sorts every bit of its 64-bit keys
_FEATURE_KERNEL_INDICES = 3072  # up to here ATen's dense backward needs no sort


def distinct_rows(rows: float, lookups: float) -> float:
    """Expected number of different rows among `lookups` uniform draws from a table of `rows`."""
    if rows <= 1:
        return min(1.0, lookups)
    return -rows * expm1(lookups * log1p(-1.0 / rows))


@dataclass(frozen=True, slots=True)
class Tables:
    """What a lookup touches: `lookups` over all tables and samples, `rows` and `dim` averages over tables.

    `ascending` says that the indices of every bag are sorted.
    """

    batch: int
    tables: int
    lookups: int
    dim: float
    rows: float
    distinct: float
    index_bytes: int
    row_item_bytes: int
    weighted: bool = False
    ascending: bool = False

    def call(self, kind: str, compute: str = "fp32") -> KernelCall:
        """The embedding kernel of this kind over these tables."""
        return EMBEDDING.call(
            kind,
            compute,
            batch=self.batch,
            tables=self.tables,
            lookups=self.lookups,
            dim=self.dim,
            rows=self.rows,
            distinct_rows=self.distinct,
            index_bytes=self.index_bytes,
            row_item_bytes=self.row_item_bytes,
            weighted=int(self.weighted),
            sorted=int(self.ascending),
        )


def _one_table(
    batch: int, weight_rows: int, dim: int, indices: TensorSpec, item_bytes: int, weighted: bool = False
) -> Tables:
    return Tables(
        batch=batch,
        tables=1,
        lookups=indices.numel,
        dim=dim,
        rows=weight_rows,
        distinct=distinct_rows(weight_rows, indices.numel),
        index_bytes=indices.itemsize,
        row_item_bytes=item_bytes,
        weighted=weighted,
    )


@lowers("aten::embedding")
def embedding(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One gather of rows."""
    weight, indices = required(signature, "weight", 0), required(signature, "indices", 1)
    table = _one_table(indices.numel, weight.shape[0], weight.shape[1], indices, weight.itemsize)
    return (table.call("lookup_forward", compute_of(weight)),) if indices.numel else ()


@lowers("aten::embedding_dense_backward", "aten::embedding_backward")
def embedding_dense_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros the size of the table, a sort of the indices unless they are few, and the sums of equal rows."""
    indices, result = required(signature, "indices", 1), signature.outputs[0]
    table = _one_table(indices.numel, result.shape[0], result.shape[1], indices, result.itemsize)
    main = table.call("lookup_backward_dense", compute_of(result))
    if indices.numel <= _FEATURE_KERNEL_INDICES:
        return (fill(result), main)
    return (fill(result), *_sorted_segments(table, result.shape[0]), main)


def _sorted_segments(table: Tables, rows: int) -> tuple[Item, ...]:
    """ATen's preparation of a dense gradient: positions, a sort, and where the runs of equal indices start."""
    count = table.lookups
    positions = small_kernel(elements=count, compute="int64", item_bytes=8)
    runs = gather_call(count, 1, 8, 8 * count, "int64")
    segments = int(table.distinct)
    offsets = tuple(small_kernel("add", elements=segments, compute="int64", item_bytes=8) for _ in range(3))
    return (positions, *radix_sort(count, index_bits(rows), table.index_bytes, table.index_bytes), runs, *offsets)


@lowers("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::embedding_bag")
def embedding_bag(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel a bag of rows."""
    weight, indices = required(signature, "weight", 0), required(signature, "indices", 1)
    weighted = bool(signature.tensors("per_sample_weights"))
    bags = signature.outputs[0].shape[0]
    table = _one_table(bags, weight.shape[0], weight.shape[1], indices, weight.itemsize, weighted)
    return (table.call("bag_forward", compute_of(weight)),)


@lowers("aten::_embedding_bag_dense_backward", "aten::_embedding_bag_backward")
def embedding_bag_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros the size of the table, a sort of the indices, and the sums of equal rows."""
    grad, indices, result = signature.inputs[0], required(signature, "indices", 1), signature.outputs[0]
    table = _one_table(grad.shape[0], result.shape[0], result.shape[-1], indices, result.itemsize)
    return (fill(result), *_sorted_segments(table, result.shape[0]), table.call("bag_backward_dense", compute_of(grad)))


@lowers("aten::_embedding_bag_sparse_backward", "aten::embedding_sparse_backward")
def embedding_bag_sparse_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient of each bag repeated for each of its rows; the indices are kept as they are."""
    grad, indices = signature.inputs[0], required(signature, "indices", 1)
    dim = grad.shape[-1]
    return (gather_call(indices.numel * dim, dim, grad.itemsize, indices.nbytes, compute_of(grad)),)


@lowers("aten::_embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A dot product of row and gradient for each lookup."""
    grad, weight, indices = signature.inputs[:3]
    table = _one_table(grad.shape[0], weight.shape[0], weight.shape[1], indices, weight.itemsize)
    return (table.call("bag_forward", compute_of(grad)),)


@lowers("aten::_coalesce", "aten::coalesce")
def coalesce(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A sparse gradient made unique: sort the indices, find the runs, add the values of equal ones."""
    indices, values = signature.inputs[:2]
    stored = indices.shape[-1]
    table = Tables(stored, 1, stored, product(values.shape[1:]), stored, stored, indices.itemsize, values.itemsize)
    add = gather_call(values.numel, int(table.dim), values.itemsize, indices.nbytes, compute_of(values))
    return (*_sorted_segments(table, _LARGEST_INDEX), add)


@lowers("aten::sparse_mask")
def sparse_mask(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The rows of a dense tensor at the places of a sparse one."""
    indices, values = signature.tensors("mask")[:2]
    run = values.numel // max(1, indices.shape[-1])
    return (gather_call(values.numel, run, values.itemsize, indices.nbytes, compute_of(values)),)


def _numbers(value: Scalar) -> tuple[int, ...]:
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()


def _study_tables(signature: Signature, weights: TensorSpec, indices: TensorSpec, batch: int, tables: int) -> Tables:
    """Tables of the table-batched kernel. The DLRM code that it comes with draws every bag sorted."""
    several = indices.numel > batch * tables
    return replace(_batched(signature, weights, indices, batch, tables, False), ascending=several)


def _batched(
    signature: Signature, weights: TensorSpec, indices: TensorSpec, batch: int, tables: int, weighted: bool
) -> Tables:
    """Tables from the scalars `rows` and `dims`; equal tables share the weights where those are not given."""
    lookups = indices.numel
    dims = _numbers(signature.scalar("dims"))
    dim = sum(dims) / len(dims) if dims else float(weights.shape[-1])
    rows = _numbers(signature.scalar("rows"))
    each = rows if len(rows) == tables else (max(1, round(weights.numel / dim / tables)),) * tables
    return Tables(
        batch=batch,
        tables=tables,
        lookups=lookups,
        dim=dim,
        rows=sum(each) / len(each),
        distinct=sum(distinct_rows(height, lookups / tables) for height in each),
        index_bytes=indices.itemsize,
        row_item_bytes=weights.itemsize,
        weighted=weighted,
    )


@lowers("traincast::batched_embedding_forward")
def batched_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all tables."""
    weights, indices = required(signature, "weights", 0), required(signature, "indices", 2)
    tables = _study_tables(signature, weights, indices, *signature.outputs[0].shape[:2])
    return (tables.call("batched_forward", compute_of(weights)),)


@lowers("traincast::batched_embedding_backward_sgd")
def batched_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that updates the rows of all tables in place."""
    weights, indices = required(signature, "weights", 1), required(signature, "indices", 3)
    tables = _study_tables(signature, weights, indices, *required(signature, "grad", 0).shape[:2])
    return (tables.call("batched_backward_sgd", compute_of(weights)),)


@lowers("fbgemm::bounds_check_indices")
def bounds_check(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that reads every index and offset and seldom writes."""
    indices, offsets = required(signature, "indices", 1), required(signature, "offsets", 2)
    return (elementwise("compare", (indices, offsets), (), compute=compute_of(indices)),)


_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
_TBE_FORWARD = {
    f"fbgemm::split_embedding_codegen_forward_{weighted}_{suffix}": weighted == "weighted"
    for weighted in ("weighted", "unweighted")
    for suffix in ("cuda", "pt2_cuda", "pt2_wrapper", "v2_cuda")
} | {
    f"fbgemm::split_embedding_codegen_lookup_{name}_function{suffix}": False
    for name in _OPTIMIZERS
    for suffix in ("", "_pt2")
}
_TBE_BACKWARD = {
    f"fbgemm::split_embedding_backward_codegen_{name}_{weighted}_exact_{suffix}": (name, weighted == "weighted")
    for name in _OPTIMIZERS
    for weighted in ("weighted", "unweighted")
    for suffix in ("cuda", "pt2_cuda", "pt2_wrapper")
}


def _tbe_weights(signature: Signature) -> TensorSpec:
    return operand(signature, "dev_weights", 0) or operand(signature, "weights", 0) or signature.inputs[0]


def _tbe_tables(signature: Signature, samples: Sequence[int], weighted: bool) -> Tables:
    """FBGEMM's tables: `samples` is the shape of the pooled result or its gradient, [batch, sum of dims]."""
    indices, offsets = required(signature, "indices", 0), required(signature, "offsets", 0)
    batch = samples[0]
    tables = max(1, (offsets.numel - 1) // max(1, batch))
    if not _numbers(signature.scalar("dims")):
        dims = (samples[-1] // tables,) * tables
        signature = Signature(
            signature.name, signature.inputs, signature.outputs, (*signature.scalars, ("dims", dims)), signature.groups
        )
    return _batched(signature, _tbe_weights(signature), indices, batch, tables, weighted)


@lowers(*_TBE_FORWARD)
def tbe_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all tables."""
    weighted = _TBE_FORWARD[signature.name] or bool(signature.tensors("indice_weights"))
    tables = _tbe_tables(signature, signature.outputs[0].shape, weighted)
    return (tables.call("tbe_forward", compute_of(_tbe_weights(signature))),)


@lowers(*_TBE_BACKWARD)
def tbe_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Linearise and sort the indices, find their runs, and update each row once."""
    optimizer, weighted = _TBE_BACKWARD[signature.name]
    grad = signature.tensors("grad_output") or signature.inputs[:1]
    tables = _tbe_tables(signature, grad[0].shape, weighted)
    main = tables.call(f"tbe_backward_{optimizer}", compute_of(_tbe_weights(signature)))
    return (*tbe_preparation(tables), main)


def tbe_preparation(tables: Tables) -> tuple[Item, ...]:
    """The launches before the update kernels, in the order of FBGEMM's backward."""
    count = tables.lookups
    bits = index_bits(int(tables.rows * tables.tables))
    linear = gather_call(count, 1, 8, count * tables.index_bytes, "int64")
    weights: tuple[Item, ...] = ()
    if tables.weighted:
        weights = radix_sort(count, bits, 8, 4)
    return (
        linear,
        *radix_sort(count, bits, 8, 4),
        small_kernel(elements=count),
        small_kernel(),
        small_kernel(),
        _pass_over(count, read_bytes=8, written_bytes=0),
        small_kernel(),
        small_kernel(),
        _pass_over(count, read_bytes=4, written_bytes=4),
        *weights,
        small_kernel(),
        _pass_over(count, read_bytes=4, written_bytes=0),
    )


def _pass_over(count: int, *, read_bytes: int, written_bytes: int) -> KernelCall:
    """Run-length encoding, a prefix sum, or the search for long runs: one walk along the sorted indices."""
    return REDUCTION.call(
        "inner",
        "int32",
        elements=count,
        outputs=count,
        bytes_read=count * read_bytes,
        bytes_written=count * written_bytes,
    )
