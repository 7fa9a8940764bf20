"""Gathers, scatters, sorts, and `index_put` with its sort."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.operands import compute_of, on_device, real_bytes
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import INDEX, REDUCTION
from traincast.costs.kernels.streaming.launches import (
    STREAM_SYNCHRONIZE,
    device_copy,
    fill,
    layout_copy,
    memcpy,
    small_kernel,
)
from traincast.ir.ops import Signature, TensorSpec

SINGLE_TILE = 3072  # keys that CUB sorts with one block, in one launch
RADIX_BITS = 8  # that one pass of CUB's radix sort orders


def index_call(
    kind: str, elements: int, row_elements: int, item_bytes: int, index_bytes: int, compute: str
) -> KernelCall:
    """A kernel that reads `elements` at random and writes them in order (gather), or reads them in order and adds each
    to (or writes it at) a random place (scatter); `row_elements` of them are together."""
    moved = elements * item_bytes
    return INDEX.call(
        kind,
        compute,
        elements=elements,
        row_elements=row_elements,
        bytes_read=moved + index_bytes,
        bytes_written=moved,
    )


def radix_sort(elements: int, bits: int, key_bytes: int = 8, value_bytes: int = 8) -> tuple[Item, ...]:
    """Launches of CUB's radix sort of pairs: one for a single tile, else a histogram, a scan and a pass per byte."""
    pair_bytes = elements * (key_bytes + value_bytes)
    compute = "int64" if key_bytes == 8 else "int32"
    one_pass = INDEX.call(
        "sort", compute, elements=elements, row_elements=1, bytes_read=pair_bytes, bytes_written=pair_bytes
    )
    if elements <= SINGLE_TILE:
        return (one_pass,)
    passes = max(1, -(-bits // RADIX_BITS))
    counters = passes * (1 << RADIX_BITS)
    histogram = REDUCTION.call(
        "full",
        compute,
        elements=elements,
        outputs=counters,
        bytes_read=elements * key_bytes,
        bytes_written=counters * 4,
    )
    memset = memcpy("memset", max(1024, elements // 16))
    before: tuple[Item, ...] = (
        memcpy("memset", 4 * counters),
        memcpy("memset", 256),
        histogram,
        small_kernel(elements=counters),
    )
    return (*before, *((memset, one_pass) * passes))


def index_bits(largest: int) -> int:
    """Bits of the largest index."""
    return max(1, largest.bit_length())


def _index_specs(signature: Signature) -> tuple[TensorSpec, ...]:
    named = signature.tensors("indices") or signature.tensors("index")
    return named or tuple(spec for spec in signature.inputs[1:] if spec.dtype in ("int64", "int32", "bool", "uint8"))


def _to_device(indices: Sequence[TensorSpec]) -> tuple[Item, ...]:
    """Index tensors on the host are copied over, and the host waits for each."""
    host = [spec for spec in indices if not on_device(spec)]
    return tuple(item for spec in host for item in (memcpy("h2d_pageable", spec.nbytes), STREAM_SYNCHRONIZE))


def _nonzero(mask: TensorSpec) -> tuple[Item, ...]:
    """Counting the set elements, telling the host how many, and writing their places."""
    positions = mask.numel * 8
    count = REDUCTION.call("full", "int32", elements=mask.numel, outputs=1, bytes_read=mask.nbytes, bytes_written=4)
    select = INDEX.call(
        "gather", "int64", elements=mask.numel, row_elements=1, bytes_read=mask.nbytes, bytes_written=positions
    )
    return (
        count,
        memcpy("d2h_pageable", 4),
        STREAM_SYNCHRONIZE,
        small_kernel(),
        select,
        small_kernel(elements=mask.numel),
    )


def _masks(indices: Sequence[TensorSpec]) -> tuple[Item, ...]:
    return tuple(item for spec in indices if spec.dtype in ("bool", "uint8") for item in _nonzero(spec))


def _run(signature: Signature, source: TensorSpec, indices: Sequence[TensorSpec]) -> int:
    """Elements that stay together: the dimensions behind the last indexed one."""
    which = signature.scalar("indices_given")
    indexed = [i for i, is_given in enumerate(which) if is_given] if isinstance(which, tuple) else range(len(indices))
    return prod(source.shape[max(indexed, default=-1) + 1 :])


@lowers("aten::index", "aten::_unsafe_index")
def index(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One gather, after index tensors on the host have been copied and masks turned into positions."""
    source, result = signature.inputs[0], signature.outputs[0]
    indices = _index_specs(signature)
    gather = index_call(
        "gather",
        result.numel,
        _run(signature, source, indices),
        result.itemsize,
        sum(real_bytes(spec) for spec in indices),
        compute_of(result),
    )
    return (*_to_device(indices), *_masks(indices), gather)


@lowers("aten::index_select", "aten::gather", "aten::take", "aten::take_along_dim")
def gather(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One gather; `index_select` along the first dimension takes whole rows."""
    source, result = signature.inputs[0], signature.outputs[0]
    run = prod(source.shape[1:]) if signature.name == "aten::index_select" and signature.scalar("dim", 0) == 0 else 1
    index_bytes = sum(real_bytes(spec) for spec in _index_specs(signature))
    return (index_call("gather", result.numel, run, result.itemsize, index_bytes, compute_of(result)),)


@lowers("aten::masked_select")
def masked_select(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Positions of the set elements, then a gather."""
    source, mask = signature.inputs[:2]
    selected = signature.outputs[0].numel if signature.outputs else mask.numel
    return (*_nonzero(mask), index_call("gather", selected, 1, source.itemsize, 8 * selected, compute_of(source)))


@lowers("aten::nonzero")
def nonzero(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Positions of the elements that are not zero; the host waits to learn how many."""
    return _nonzero(signature.inputs[0])


_SCATTERS = (
    "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", "aten::scatter_reduce",
    "aten::scatter_reduce_", "aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_",
    "aten::index_fill", "aten::index_fill_", "aten::masked_scatter", "aten::masked_scatter_", "aten::put_",
)  # fmt: skip


@lowers("aten::nonzero_static")
def nonzero_static(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """As `nonzero`, into a result of known size: the host does not wait."""
    count, _, _, *rest = _nonzero(signature.inputs[0])
    return (count, *rest)


@lowers(*_SCATTERS)
def scatter(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One scatter, onto a copy of the input unless in place."""
    target, values = signature.inputs[0], signature.inputs[-1]
    copied = () if signature.name.endswith("_") else device_copy(target, signature.outputs[0])
    rows = signature.name.startswith("aten::index_") and signature.scalar("dim", 0) == 0
    run = prod(target.shape[1:]) if rows else 1
    index_bytes = sum(real_bytes(spec) for spec in _index_specs(signature))
    return (*copied, index_call("scatter", values.numel, run, target.itemsize, index_bytes, compute_of(target)))


@lowers(
    "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put",
    "aten::_index_put_impl",
)  # fmt: skip
def index_put(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A scatter; with `accumulate` a sort of the flattened indices and a kernel that adds equal ones in order."""
    target, values = signature.inputs[0], signature.inputs[-1]
    indices = signature.tensors("indices") or signature.inputs[1:-1]
    items: tuple[Item, ...] = () if signature.name.endswith("_") else device_copy(target, signature.outputs[0])
    items += (*_to_device(indices), *_masks(indices))
    index_bytes = sum(real_bytes(spec) for spec in indices)
    run = _run(signature, target, indices)
    if not signature.scalar("accumulate", False):
        return (*items, index_call("scatter", values.numel, run, target.itemsize, index_bytes, compute_of(target)))
    return (*items, *_accumulate(target, values, indices, run))


def _accumulate(target: TensorSpec, values: TensorSpec, indices: Sequence[TensorSpec], run: int) -> tuple[Item, ...]:
    """ATen's `index_put_with_sort`: wrap and scale each index, add them up, sort with positions, add the values.

    Index tensors on the host are wrapped and scaled there.
    """
    count = max((spec.numel for spec in indices), default=1)
    arithmetic = small_kernel("add", elements=count, compute="int64", item_bytes=8)
    launches = 2 * sum(on_device(spec) for spec in indices) + len(indices)
    leading = values.numel // max(1, run * count) > 1
    packed = (layout_copy(values),) if leading or not values.is_contiguous else ()
    put = INDEX.call(
        "put",
        compute_of(target),
        elements=values.numel,
        row_elements=run,
        bytes_read=values.nbytes * 2 + 16 * count,
        bytes_written=values.nbytes,
    )
    positions = small_kernel(elements=count, compute="int64", item_bytes=8)
    bits = index_bits(target.numel // max(1, run))
    return (*packed, *(arithmetic,) * launches, positions, *radix_sort(count, bits), put)


@lowers(
    "aten::sort",
    "aten::argsort",
    "aten::msort",
    "aten::unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
)
def sort(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A radix sort with positions over every bit of the key; `unique` also tells the host how many there are."""
    source = signature.inputs[0]
    positions = small_kernel(elements=source.numel, compute="int64", item_bytes=8)
    sorted_ = radix_sort(source.numel, 8 * source.itemsize, source.itemsize, 8)
    if "unique" not in signature.name:
        return (*device_copy(source, source), positions, *sorted_)
    scan = index_call("gather", source.numel, 1, source.itemsize, 8 * source.numel, compute_of(source))
    return (positions, *sorted_, scan, memcpy("d2h_pageable", 8), STREAM_SYNCHRONIZE)


@lowers("aten::topk", "aten::kthvalue")
def topk(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Radix selection reads the rows once per radix digit; the few largest are then sorted."""
    source, largest = signature.inputs[0], signature.outputs[0]
    select = REDUCTION.call(
        "inner",
        compute_of(source),
        elements=source.numel,
        outputs=largest.numel,
        bytes_read=source.nbytes * source.itemsize,
        bytes_written=sum(spec.nbytes for spec in signature.outputs),
    )
    return (select, *radix_sort(largest.numel, 8 * largest.itemsize, largest.itemsize, 8)[:1])


@lowers("aten::one_hot")
def one_hot(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then a one per row."""
    rows = signature.inputs[0]
    return (fill(signature.outputs[0]), index_call("scatter", rows.numel, 1, 8, rows.nbytes, "int64"))


@lowers("aten::bincount", "aten::histc")
def bincount(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The largest value goes to the host, then a histogram by atomics."""
    source = signature.inputs[0]
    count = REDUCTION.call(
        "full", compute_of(source), elements=source.numel, outputs=2, bytes_read=source.nbytes, bytes_written=16
    )
    add = index_call("scatter", source.numel, 1, source.itemsize, 0, compute_of(source))
    return (count, memcpy("d2h_pageable", 16), STREAM_SYNCHRONIZE, fill(signature.outputs[0]), add)


@lowers("aten::searchsorted", "aten::bucketize")
def searchsorted(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; each value walks a binary search."""
    result = signature.outputs[0]
    boundaries = signature.inputs[0]
    steps = index_bits(boundaries.shape[-1] if boundaries.shape else 1)
    return (
        index_call(
            "gather", result.numel, 1, result.itemsize, result.numel * boundaries.itemsize * steps, compute_of(result)
        ),
    )
