"""Gathers, scatters, sorts, and `index_put` with its sort."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    count_real_bytes,
    get_compute_type,
    is_on_device,
    lowers,
)
from traincast.costs.kernels.streaming import INDEX, REDUCTION
from traincast.costs.kernels.streaming.launches import (
    STREAM_SYNCHRONIZE,
    make_device_copy,
    make_fill_kernel,
    make_layout_copy,
    make_memcpy,
    make_small_kernel,
)
from traincast.ir.ops import Signature, TensorSpec

SINGLE_TILE = 3072  # keys that CUB sorts with one block, in one launch
RADIX_BITS = 8  # that one pass of CUB's radix sort orders


def make_index_call(
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


def make_radix_sort(elements: int, bits: int, key_bytes: int = 8, value_bytes: int = 8) -> tuple[Item, ...]:
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
    memset = make_memcpy("memset", max(1024, elements // 16))
    before: tuple[Item, ...] = (
        make_memcpy("memset", 4 * counters),
        make_memcpy("memset", 256),
        histogram,
        make_small_kernel(elements=counters),
    )
    return (*before, *((memset, one_pass) * passes))


def count_index_bits(largest: int) -> int:
    """Bits of the largest index."""
    return max(1, largest.bit_length())


def _list_index_specs(signature: Signature) -> tuple[TensorSpec, ...]:
    named = signature.tensors("indices") or signature.tensors("index")
    return named or tuple(spec for spec in signature.inputs[1:] if spec.dtype in ("int64", "int32", "bool", "uint8"))


def _make_to_device(indices: Sequence[TensorSpec]) -> tuple[Item, ...]:
    """Index tensors on the host are copied over, and the host waits for each."""
    host = [spec for spec in indices if not is_on_device(spec)]
    return tuple(item for spec in host for item in (make_memcpy("h2d_pageable", spec.nbytes), STREAM_SYNCHRONIZE))


def _make_nonzero(mask: TensorSpec) -> tuple[Item, ...]:
    """Counting the set elements, telling the host how many, and writing their places."""
    positions = mask.numel * 8
    count = REDUCTION.call("full", "int32", elements=mask.numel, outputs=1, bytes_read=mask.nbytes, bytes_written=4)
    select = INDEX.call(
        "gather", "int64", elements=mask.numel, row_elements=1, bytes_read=mask.nbytes, bytes_written=positions
    )
    return (
        count,
        make_memcpy("d2h_pageable", 4),
        STREAM_SYNCHRONIZE,
        make_small_kernel(),
        select,
        make_small_kernel(elements=mask.numel),
    )


def _find_masks(indices: Sequence[TensorSpec]) -> tuple[Item, ...]:
    return tuple(item for spec in indices if spec.dtype in ("bool", "uint8") for item in _make_nonzero(spec))


def _count_run_elements(signature: Signature, source: TensorSpec, indices: Sequence[TensorSpec]) -> int:
    """Elements that stay together: the dimensions behind the last indexed one."""
    which = signature.scalar("indices_given")
    indexed = [i for i, is_given in enumerate(which) if is_given] if isinstance(which, tuple) else range(len(indices))
    return prod(source.shape[max(indexed, default=-1) + 1 :])


@lowers("aten::index", "aten::_unsafe_index")
def lower_index(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One gather, after index tensors on the host have been copied and masks turned into positions."""
    source, result = signature.inputs[0], signature.outputs[0]
    indices = _list_index_specs(signature)
    gather = make_index_call(
        "gather",
        result.numel,
        _count_run_elements(signature, source, indices),
        result.itemsize,
        sum(count_real_bytes(spec) for spec in indices),
        get_compute_type(result),
    )
    return (*_make_to_device(indices), *_find_masks(indices), gather)


@lowers("aten::index_select", "aten::gather", "aten::take", "aten::take_along_dim")
def lower_gather(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One gather; `index_select` along the first dimension takes whole rows."""
    source, result = signature.inputs[0], signature.outputs[0]
    run = prod(source.shape[1:]) if signature.name == "aten::index_select" and signature.scalar("dim", 0) == 0 else 1
    index_bytes = sum(count_real_bytes(spec) for spec in _list_index_specs(signature))
    return (make_index_call("gather", result.numel, run, result.itemsize, index_bytes, get_compute_type(result)),)


@lowers("aten::masked_select")
def lower_masked_select(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Positions of the set elements, then a gather."""
    source, mask = signature.inputs[:2]
    selected = signature.outputs[0].numel if signature.outputs else mask.numel
    return (
        *_make_nonzero(mask),
        make_index_call("gather", selected, 1, source.itemsize, 8 * selected, get_compute_type(source)),
    )


@lowers("aten::nonzero")
def lower_nonzero(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Positions of the elements that are not zero; the host waits to learn how many."""
    return _make_nonzero(signature.inputs[0])


_SCATTERS = (
    "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", "aten::scatter_reduce",
    "aten::scatter_reduce_", "aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_",
    "aten::index_fill", "aten::index_fill_", "aten::masked_scatter", "aten::masked_scatter_", "aten::put_",
)  # fmt: skip


@lowers("aten::nonzero_static")
def lower_nonzero_static(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """As `nonzero`, into a result of known size: the host does not wait."""
    count, _, _, *rest = _make_nonzero(signature.inputs[0])
    return (count, *rest)


@lowers(*_SCATTERS)
def lower_scatter(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One scatter, onto a copy of the input unless in place."""
    target, values = signature.inputs[0], signature.inputs[-1]
    copied = () if signature.name.endswith("_") else make_device_copy(target, signature.outputs[0])
    rows = signature.name.startswith("aten::index_") and signature.scalar("dim", 0) == 0
    run = prod(target.shape[1:]) if rows else 1
    index_bytes = sum(count_real_bytes(spec) for spec in _list_index_specs(signature))
    return (
        *copied,
        make_index_call("scatter", values.numel, run, target.itemsize, index_bytes, get_compute_type(target)),
    )


@lowers(
    "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put",
    "aten::_index_put_impl",
)  # fmt: skip
def lower_index_put(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A scatter; with `accumulate` a sort of the flattened indices and a kernel that adds equal ones in order."""
    target, values = signature.inputs[0], signature.inputs[-1]
    indices = signature.tensors("indices") or signature.inputs[1:-1]
    items: tuple[Item, ...] = () if signature.name.endswith("_") else make_device_copy(target, signature.outputs[0])
    items += (*_make_to_device(indices), *_find_masks(indices))
    index_bytes = sum(count_real_bytes(spec) for spec in indices)
    run = _count_run_elements(signature, target, indices)
    if not signature.scalar("accumulate", False):
        return (
            *items,
            make_index_call("scatter", values.numel, run, target.itemsize, index_bytes, get_compute_type(target)),
        )
    return (*items, *_make_accumulate(target, values, indices, run))


def _make_accumulate(
    target: TensorSpec, values: TensorSpec, indices: Sequence[TensorSpec], run: int
) -> tuple[Item, ...]:
    """ATen's `index_put_with_sort`: wrap and scale each index, add them up, sort with positions, add the values.

    Index tensors on the host are wrapped and scaled there.
    """
    count = max((spec.numel for spec in indices), default=1)
    arithmetic = make_small_kernel("add", elements=count, compute="int64", item_bytes=8)
    launches = 2 * sum(is_on_device(spec) for spec in indices) + len(indices)
    leading = values.numel // max(1, run * count) > 1
    packed = (make_layout_copy(values),) if leading or not values.is_contiguous else ()
    put = INDEX.call(
        "put",
        get_compute_type(target),
        elements=values.numel,
        row_elements=run,
        bytes_read=values.nbytes * 2 + 16 * count,
        bytes_written=values.nbytes,
    )
    positions = make_small_kernel(elements=count, compute="int64", item_bytes=8)
    bits = count_index_bits(target.numel // max(1, run))
    return (*packed, *(arithmetic,) * launches, positions, *make_radix_sort(count, bits), put)


@lowers(
    "aten::sort",
    "aten::argsort",
    "aten::msort",
    "aten::unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
)
def lower_sort(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A radix sort with positions over every bit of the key; `unique` also tells the host how many there are."""
    source = signature.inputs[0]
    positions = make_small_kernel(elements=source.numel, compute="int64", item_bytes=8)
    sorted_ = make_radix_sort(source.numel, 8 * source.itemsize, source.itemsize, 8)
    if "unique" not in signature.name:
        return (*make_device_copy(source, source), positions, *sorted_)
    scan = make_index_call("gather", source.numel, 1, source.itemsize, 8 * source.numel, get_compute_type(source))
    return (positions, *sorted_, scan, make_memcpy("d2h_pageable", 8), STREAM_SYNCHRONIZE)


@lowers("aten::topk", "aten::kthvalue")
def lower_topk(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Radix selection reads the rows once per radix digit; the few largest are then sorted."""
    source, largest = signature.inputs[0], signature.outputs[0]
    select = REDUCTION.call(
        "inner",
        get_compute_type(source),
        elements=source.numel,
        outputs=largest.numel,
        bytes_read=source.nbytes * source.itemsize,
        bytes_written=sum(spec.nbytes for spec in signature.outputs),
    )
    return (select, *make_radix_sort(largest.numel, 8 * largest.itemsize, largest.itemsize, 8)[:1])


@lowers("aten::one_hot")
def lower_one_hot(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Zeros, then a one per row."""
    rows = signature.inputs[0]
    return (make_fill_kernel(signature.outputs[0]), make_index_call("scatter", rows.numel, 1, 8, rows.nbytes, "int64"))


@lowers("aten::bincount", "aten::histc")
def lower_bincount(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The largest value goes to the host, then a histogram by atomics."""
    source = signature.inputs[0]
    count = REDUCTION.call(
        "full", get_compute_type(source), elements=source.numel, outputs=2, bytes_read=source.nbytes, bytes_written=16
    )
    add = make_index_call("scatter", source.numel, 1, source.itemsize, 0, get_compute_type(source))
    return (count, make_memcpy("d2h_pageable", 16), STREAM_SYNCHRONIZE, make_fill_kernel(signature.outputs[0]), add)


@lowers("aten::searchsorted", "aten::bucketize")
def lower_searchsorted(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; each value walks a binary search."""
    result = signature.outputs[0]
    boundaries = signature.inputs[0]
    steps = count_index_bits(boundaries.shape[-1] if boundaries.shape else 1)
    return (
        make_index_call(
            "gather",
            result.numel,
            1,
            result.itemsize,
            result.numel * boundaries.itemsize * steps,
            get_compute_type(result),
        ),
    )
