"""FBGEMM's table-batched embedding: lookups of many tables in one kernel, updates fused into its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.embedding.lowering.lookups import read_batched_tables, read_described_tables, read_integers
from traincast.costs.kernels.embedding.tables import Tables, unknown_longest_bag
from traincast.costs.kernels.operands import compute_of, operand, required
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import REDUCTION
from traincast.costs.kernels.streaming.launches import elementwise, fill, small_kernel
from traincast.costs.kernels.streaming.lowering.index import index_bits, index_call, radix_sort
from traincast.ir.ops import Signature, TensorSpec


@lowers("fbgemm::bounds_check_indices")
def bounds_check(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that reads every index and offset and seldom writes."""
    indices, offsets = required(signature, "indices", 1), required(signature, "offsets", 2)
    return (elementwise("compare", (indices, offsets), (), compute=compute_of(indices)),)


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


def _tbe_weights(signature: Signature) -> TensorSpec:
    return operand(signature, "dev_weights", 0) or operand(signature, "weights", 0) or signature.inputs[0]


def _tbe_tables(signature: Signature, samples: Sequence[int], weighted: bool) -> Tables:
    """FBGEMM's tables: `samples` is the shape of the pooled result or its gradient, [batch, sum of dims]."""
    indices, offsets = required(signature, "indices", 0), required(signature, "offsets", 0)
    batch = samples[0]
    if signature.scalar("load") is not None:
        return read_described_tables(signature, _tbe_weights(signature), indices, batch, weighted)
    tables = max(1, (offsets.numel - 1) // max(1, batch))
    if not read_integers(signature.scalar("dims")):
        dims = (samples[-1] // tables,) * tables
        signature = Signature(
            signature.name, signature.inputs, signature.outputs, (*signature.scalars, ("dims", dims)), signature.groups
        )
    batched = read_batched_tables(signature, _tbe_weights(signature), indices, batch, tables, weighted)
    if signature.scalar("pooling") is not None:
        return batched
    return replace(batched, longest_bag=unknown_longest_bag(batch, tables, indices.numel))


@lowers(*_TBE_FORWARD)
def tbe_forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all tables."""
    weighted = _TBE_FORWARD[signature.name] or bool(signature.tensors("indice_weights"))
    tables = _tbe_tables(signature, signature.outputs[0].shape, weighted)
    return (tables.call("tbe_forward", compute_of(_tbe_weights(signature))),)


@lowers(*_TBE_BACKWARD)
def tbe_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Linearise and sort the indices, find their runs, update each row once (`dense`: its gradient, after zeros)."""
    optimizer, weighted = _TBE_BACKWARD[signature.name]
    grad = signature.tensors("grad_output") or signature.inputs[:1]
    tables = _tbe_tables(signature, grad[0].shape, weighted)
    main = tables.call(f"tbe_backward_{optimizer}", compute_of(_tbe_weights(signature)))
    zeros = (fill(signature.outputs[0]),) if optimizer == "dense" and signature.outputs else ()
    return (*zeros, *tbe_preparation(tables), main)


def tbe_preparation(tables: Tables) -> tuple[Item, ...]:
    """The launches before the update kernels, in the order of FBGEMM's backward."""
    count = tables.lookups
    bits = index_bits(int(tables.rows))
    linear = index_call("gather", count, 1, 8, count * tables.index_bytes, "int64")
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
    """Run-length encoding, a prefix sum, or the search for long runs: one pass over the sorted indices."""
    return REDUCTION.call(
        "inner",
        "int32",
        elements=count,
        outputs=count,
        bytes_read=count * read_bytes,
        bytes_written=count * written_bytes,
    )
