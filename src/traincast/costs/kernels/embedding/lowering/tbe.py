"""FBGEMM's table-batched embedding: lookups of many tables in one kernel, updates fused into its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.embedding.lowering.lookups import read_batched_tables, read_described_tables, read_integers
from traincast.costs.kernels.embedding.tables import Tables, guess_longest_bag
from traincast.costs.kernels.operands import (
    find_operand,
    get_compute_type,
    read_integer_argument,
    require_operand,
)
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import REDUCTION
from traincast.costs.kernels.streaming.launches import make_elementwise_call, make_fill_kernel, make_small_kernel
from traincast.costs.kernels.streaming.lowering.index import count_index_bits, make_index_call, make_radix_sort
from traincast.ir.ops import Signature, TensorSpec


@lowers("fbgemm::bounds_check_indices")
def lower_bounds_check(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that reads every index and offset and seldom writes."""
    indices, offsets = require_operand(signature, "indices", 1), require_operand(signature, "offsets", 2)
    return (make_elementwise_call("compare", (indices, offsets), (), compute=get_compute_type(indices)),)


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
