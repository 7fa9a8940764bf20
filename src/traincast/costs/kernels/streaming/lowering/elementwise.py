"""Element-wise ops and copies: arithmetic, fills, random numbers, losses, fused chains; layouts, types, devices,
concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from traincast.costs.kernels.registry import (
    Item,
    LoweringContext,
    get_compute_type,
    is_dense,
    is_on_device,
    list_read_operands,
    lowers,
    make_aten_names,
    require_operand,
    sum_real_bytes,
)
from traincast.costs.kernels.streaming import COPY
from traincast.costs.kernels.streaming.launches import (
    STREAM_SYNCHRONIZE,
    make_device_copy,
    make_elementwise_call,
    make_fill_kernel,
    make_iterated_call,
    make_layout_copy,
    make_memcpy,
    make_reduction_call,
    make_small_kernel,
)
from traincast.costs.kernels.streaming.lowering.index import make_index_call
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


# Arithmetic class -> ops. Each is known in place too.
_POINTWISE = {
    "add": """add sub rsub neg abs sign sgn clamp clamp_min clamp_max hardtanh maximum minimum fmax fmin floor ceil
        round trunc frac lerp addcmul nan_to_num bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__
        __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift relu6 _add_relu
        subtract absolute""",
    "mul": "mul square _masked_scale hardswish hardsigmoid native_dropout_backward multiply ldexp",
    "div": "div reciprocal remainder fmod floor_divide true_divide divide addcdiv",
    "pow": "pow sqrt rsqrt atan2 hypot float_power",
    "tanh": "tanh sigmoid tanh_backward sigmoid_backward sin cos tan asin acos atan sinh cosh asinh acosh atanh",
    "relu": """relu leaky_relu threshold threshold_backward leaky_relu_backward hardtanh_backward hardswish_backward
        hardsigmoid_backward prelu _prelu_kernel _prelu_kernel_backward rrelu_with_noise""",
    "gelu": """gelu gelu_backward silu silu_backward mish mish_backward erf erfc erfinv glu glu_backward
        softplus softplus_backward elu elu_backward celu selu lgamma digamma""",
    "exp": """exp exp2 expm1 log log2 log10 log1p logit logit_backward log_sigmoid_forward log_sigmoid_backward xlogy
        logaddexp logaddexp2 special_xlog1py""",
    "compare": """eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite isneginf
        isposinf where masked_fill signbit heaviside isclose tril triu""",
}
# Constant or counting fills: what they write, they write without reading.
_FILLS = """
    fill fill_ zero zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange linspace
    eye scalar_tensor tril_indices triu_indices hann_window hamming_window range logspace
"""
_RANDOM = """
    bernoulli_ uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ rand rand_like randn randn_like
    randint randint_like randperm uniform normal
"""
_IGNORED = frozenset({"grad_input"})
_NONE, _MEAN = 0, 1  # values of ATen's `reduction`


def _list_kinds() -> dict[str, str]:
    table: dict[str, str] = {}
    for kind, names in _POINTWISE.items():
        for name in names.split():
            table[f"aten::{name}"] = kind
            table[f"aten::{name}_"] = kind
    return table


_KINDS = _list_kinds()


@lowers(*_KINDS)
def lower_pointwise(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel; comparisons compute in the type of what they compare."""
    if _find_sparse_arguments(signature):
        return _lower_sparse(signature)
    kind = _KINDS[signature.name]
    outputs = [spec for spec in signature.outputs if is_on_device(spec) and spec.numel]
    if not outputs:
        return ()
    reads = list_read_operands(signature, *_IGNORED)
    compute = get_compute_type(reads[-1]) if kind == "compare" and reads else get_compute_type(outputs[0])
    return (make_iterated_call(kind, reads, outputs, compute=compute),)


def _find_sparse_arguments(signature: Signature) -> list[str]:
    """Names of the arguments that are sparse: each is an index and a value tensor among the inputs."""
    return [name.removesuffix("_layout") for name, value in signature.scalars if value == "sparse_coo"]


def _lower_sparse(signature: Signature) -> tuple[Item, ...]:
    """A sparse operand: scattered onto a dense one, else arithmetic on the stored values."""
    name = _find_sparse_arguments(signature)[-1]
    indices, values = signature.tensors(name)[:2]
    target = signature.inputs[0]
    if name == "self":
        return (make_elementwise_call(_KINDS[signature.name], (values,), (values,)),)
    run = values.numel // max(1, indices.shape[-1])
    return (make_index_call("scatter", values.numel, run, target.itemsize, indices.nbytes, get_compute_type(target)),)


@lowers(*make_aten_names(_FILLS))
def lower_fills(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that only writes."""
    return tuple(make_fill_kernel(spec) for spec in signature.outputs if is_on_device(spec) and spec.numel)


@lowers(*make_aten_names(_RANDOM))
def lower_random(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that draws random numbers and only writes."""
    return tuple(
        make_elementwise_call("dropout", (), (spec,)) for spec in signature.outputs if is_on_device(spec) and spec.numel
    )


@lowers("aten::native_dropout", "aten::_fused_dropout", "aten::bernoulli")
def lower_dropout(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Reads the input, draws a mask, writes the result and the mask."""
    outputs = [spec for spec in signature.outputs if is_on_device(spec)]
    return (make_elementwise_call("dropout", list_read_operands(signature), outputs),) if outputs else ()


@lowers("inductor::fused")
def lower_fused(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel that streams what it reads and writes; rows it reduces stay on the chip meanwhile."""
    tensors = (*signature.inputs, *signature.outputs)
    return (
        (make_elementwise_call("add", signature.inputs, signature.outputs),)
        if any(spec.numel for spec in tensors)
        else ()
    )


def _make_loss_reduction(signature: Signature, losses: TensorSpec) -> tuple[Item, ...]:
    """The reduction of a loss per element to its mean or sum."""
    if signature.scalar("reduction", _MEAN) == _NONE:
        return ()
    return (make_reduction_call("full", losses, signature.outputs[:1]),)


@lowers(
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::huber_loss",
    "aten::soft_margin_loss",
    "aten::l1_loss",
    "aten::kl_div",
)
def lower_pointwise_loss(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Loss per element, then its reduction."""
    source = signature.inputs[0]
    return (
        make_elementwise_call("loss", list_read_operands(signature), (source,)),
        *_make_loss_reduction(signature, source),
    )


@lowers("aten::binary_cross_entropy")
def lower_binary_cross_entropy(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """As other losses; 1.x reduces into a temporary and copies it to the result."""
    calls = lower_pointwise_loss(signature, context)
    if context.framework_version < (2, 0) and len(calls) > 1:
        return (*calls, make_memcpy("d2d", signature.outputs[0].nbytes))
    return calls


@lowers("aten::binary_cross_entropy_with_logits")
def lower_binary_cross_entropy_with_logits(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """log-sigmoid, 1 - target, times the input, minus the log-sigmoid; weights multiply; then the reduction."""
    logits, target = signature.inputs[:2]
    one = (logits,)
    calls: list[Item] = [
        make_elementwise_call("exp", one, one),
        make_elementwise_call("add", (target,), one),
        make_elementwise_call("mul", (logits, target), one),
        make_elementwise_call("add", (logits, target), one),
    ]
    if signature.tensors("pos_weight"):
        calls += [make_elementwise_call("mul", (logits, target), one) for _ in range(3)]
    if signature.tensors("weight"):
        calls.append(make_elementwise_call("mul", (logits, target), one))
    return (*calls, *_make_loss_reduction(signature, logits))


@lowers(
    "aten::mse_loss_backward",
    "aten::smooth_l1_loss_backward",
    "aten::huber_loss_backward",
    "aten::soft_margin_loss_backward",
)
def lower_pointwise_loss_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient is zeroed, then written."""
    return (
        make_fill_kernel(signature.outputs[0]),
        make_elementwise_call("loss", list_read_operands(signature), signature.outputs),
    )


@lowers("aten::binary_cross_entropy_backward")
def lower_binary_cross_entropy_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient, then its division by the number of elements for a mean."""
    outputs = signature.outputs
    calls = (make_elementwise_call("loss", list_read_operands(signature), outputs),)
    if signature.scalar("reduction", _MEAN) != _MEAN:
        return calls
    return (*calls, make_elementwise_call("div", outputs, outputs))


@lowers("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def lower_nll_loss(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel picks a log-probability per target and reduces."""
    target = signature.inputs[1]
    picked = TensorSpec(target.shape, target.stride, signature.inputs[0].dtype, target.device)
    return (make_reduction_call("full", picked, signature.outputs, extra_read=target.nbytes),)


@lowers("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def lower_nll_loss_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The gradient is zeroed, then one element per target is written."""
    target = signature.inputs[2]
    return (
        make_fill_kernel(signature.outputs[0]),
        make_small_kernel("loss", elements=target.numel, compute="fp32", item_bytes=8),
    )
