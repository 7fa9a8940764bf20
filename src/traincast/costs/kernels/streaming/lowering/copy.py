"""Copies: between layouts, types and devices, concatenation, padding, and packing for sharded data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from traincast.costs.kernels.operands import (
    get_compute_type,
    is_dense,
    is_on_device,
    list_read_operands,
    require_operand,
    sum_real_bytes,
)
from traincast.costs.kernels.registry import Item, LoweringContext, lowers
from traincast.costs.kernels.streaming import COPY
from traincast.costs.kernels.streaming.launches import (
    STREAM_SYNCHRONIZE,
    make_device_copy,
    make_fill_kernel,
    make_layout_copy,
    make_memcpy,
)
from traincast.ir.ops import Signature, TensorSpec

_CAT_TENSORS = 128  # tensors one launch of ATen's concatenation kernel takes
_STAGED_BYTES = 64 << 10  # up to here an asynchronous copy from pageable memory returns before the device is reached
# The tensors that each op moves, once read and once written; its other tensor is the buffer on the other side.
_MOVED = {
    "fsdp::all_gather_copy_in": "all_gather_inputs",
    "fsdp::split_with_sizes_copy": "out",
    "fsdp::chunk_cat": "tensors",
}


@lowers(
    "aten::_to_copy",
    "aten::clone",
    "aten::contiguous",
    "aten::to",
    "aten::_copy_from",
    "aten::view_copy",
    "aten::expand_copy",
)
def lower_copy(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A copy of the input in another type, layout or place; nothing where `to` or `contiguous` hand back the input. A
    copy to the host that need not wait goes to pinned memory, which `to` takes for it."""
    source, target = signature.inputs[0], signature.outputs[0]
    unchanged = source == target and signature.name in ("aten::contiguous", "aten::to")
    unwaited = bool(signature.scalar("non_blocking", False))
    if unwaited and is_on_device(source) and target.device == "cpu":
        target = replace(target, device="cpu:pinned")
    return () if unchanged else _make_transfer(source, target, unwaited)


@lowers("aten::copy_", "aten::copy")
def lower_copy_into(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A copy into an existing tensor, which is not read; the source is broadcast to its shape."""
    target, source = require_operand(signature, "self", 0), require_operand(signature, "src", 1)
    return _make_transfer(source, target, bool(signature.scalar("non_blocking", False)))


def _make_transfer(source: TensorSpec, target: TensorSpec, non_blocking: bool) -> tuple[Item, ...]:
    if not target.numel:
        return ()
    if is_on_device(source) and is_on_device(target):
        return make_device_copy(source, target) if source.shape == target.shape else _is_broadcast(source, target)
    if is_on_device(target):
        return _make_to_device(source, target, non_blocking)
    return _make_to_host(source, target, non_blocking)


def _is_broadcast(source: TensorSpec, target: TensorSpec) -> tuple[Item, ...]:
    """A source of fewer elements, seen through stride 0."""
    lead = len(target.shape) - len(source.shape)
    stride = (0,) * lead + tuple(
        0 if size == 1 else step for size, step in zip(source.shape, source.stride, strict=True)
    )
    return make_device_copy(TensorSpec(target.shape, stride, source.dtype, source.device), target)


def _make_to_device(source: TensorSpec, target: TensorSpec, non_blocking: bool) -> tuple[Item, ...]:
    """The host casts and packs; the copy engine moves the target's bytes; a strided target needs one kernel more."""
    pinned = source.device == "cpu:pinned"
    items: tuple[Item, ...] = (make_memcpy("h2d_pinned" if pinned else "h2d_pageable", target.nbytes),)
    if not non_blocking or (not pinned and target.nbytes > _STAGED_BYTES):
        items += (STREAM_SYNCHRONIZE,)
    return items if is_dense(target) else (*items, make_layout_copy(target))


def _make_to_host(source: TensorSpec, target: TensorSpec, non_blocking: bool) -> tuple[Item, ...]:
    """The device packs a strided source; the copy engine moves it in its own type. Pageable copies always wait."""
    pinned = target.device == "cpu:pinned"
    items: tuple[Item, ...] = () if is_dense(source) else (make_layout_copy(source),)
    items += (make_memcpy("d2h_pinned" if pinned else "d2h_pageable", source.nbytes),)
    return items if non_blocking and pinned else (*items, STREAM_SYNCHRONIZE)


@lowers("aten::cat", "aten::concat", "aten::stack", "aten::_cat", "aten::hstack", "aten::vstack")
def lower_cat(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Concatenation, at most 128 tensors per launch."""
    parts = [spec for spec in list_read_operands(signature) if spec.numel]
    return tuple(_make_cat_call(parts[i : i + _CAT_TENSORS]) for i in range(0, len(parts), _CAT_TENSORS))


@lowers("aten::split_with_sizes_copy", "aten::unbind_copy", "aten::split_copy", "aten::_chunk_cat")
def lower_split_copy(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A split into fresh tensors moves what a concatenation of them would."""
    parts = [spec for spec in (signature.outputs or list_read_operands(signature)) if spec.numel]
    return tuple(_make_cat_call(parts[i : i + _CAT_TENSORS]) for i in range(0, len(parts), _CAT_TENSORS))


def _make_cat_call(parts: Sequence[TensorSpec]) -> Item:
    elements = sum(spec.numel for spec in parts)
    return COPY.call(
        "cat",
        get_compute_type(parts[0]),
        elements=elements,
        bytes_read=sum_real_bytes(parts),
        bytes_written=elements * parts[0].itemsize,
        tensors=len(parts),
    )


@lowers(
    "aten::repeat", "aten::roll", "aten::flip", "aten::rot90", "aten::pixel_shuffle", "aten::pixel_unshuffle",
    "aten::channel_shuffle", "aten::im2col", "aten::col2im", "aten::reflection_pad2d", "aten::replication_pad2d",
    "aten::reflection_pad1d", "aten::replication_pad1d", "aten::tile", "aten::masked_select_backward",
    "aten::permute_copy", "aten::transpose_copy", "aten::slice_copy", "aten::as_strided_copy",
)  # fmt: skip
def lower_rearrange(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that writes the input's elements in another order."""
    source, target = signature.inputs[0], signature.outputs[0]
    call = COPY.call(
        "layout",
        get_compute_type(target),
        elements=target.numel,
        bytes_read=min(source.nbytes, target.nbytes),
        bytes_written=target.nbytes,
        tensors=2,
    )
    return (call,) if target.numel else ()


@lowers("aten::constant_pad_nd")
def lower_pad(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The result is filled, then the input copied into its middle; negative padding only cuts."""
    source, target = signature.inputs[0], signature.outputs[0]
    inner = source if source.numel <= target.numel else target
    return (make_fill_kernel(target), make_layout_copy(inner))


@lowers(
    "aten::slice_backward",
    "aten::select_backward",
    "aten::diagonal_backward",
    "aten::as_strided_backward",
    "aten::unfold_backward",
)
def lower_view_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient of a view: zeros, then the gradient copied into its place."""
    grad, whole = signature.inputs[0], signature.outputs[0]
    return (make_fill_kernel(whole), *_copy_into_part(grad, whole, signature.scalar("dim", 0)))


@lowers("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter", "aten::as_strided_scatter")
def lower_view_scatter(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """A copy of the whole, then the part copied into its place."""
    whole, part = signature.inputs[:2]
    target = signature.outputs[0]
    return (*make_device_copy(whole, target), *_copy_into_part(part, target, signature.scalar("dim", 0)))


def _copy_into_part(part: TensorSpec, whole: TensorSpec, dim: object) -> tuple[Item, ...]:
    """A copy into a slice: one piece of memory where everything before the sliced dimension has size 1."""
    outermost = isinstance(dim, int) and prod(whole.shape[: dim % max(len(whole.shape), 1)]) == 1
    if part.is_contiguous and (outermost or part.numel == whole.numel):
        return (make_memcpy("d2d", part.nbytes),)
    return (make_layout_copy(part),)


@lowers(*_MOVED)
def lower_pack(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel for all parameters of a layer."""
    moved = [spec for spec in signature.tensors(_MOVED[signature.name]) if spec.numel]
    if not moved:
        return ()
    nbytes = sum_real_bytes(moved)
    elements = sum(spec.numel for spec in moved)
    call = COPY.call(
        "cat",
        get_compute_type(moved[0]),
        elements=elements,
        bytes_read=nbytes,
        bytes_written=nbytes,
        tensors=len(moved),
    )
    return (call,)
