"""The ops of a step as a CPU runs them: a capture is of what CUDA would run, and some of its ops exist only there."""

from __future__ import annotations

from dataclasses import replace

from traincast.ir.ops import Scalar, Signature, TensorSpec

VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "t", "transpose", "view", "_unsafe_view", "_reshape_alias", "reshape", "slice", "select", "expand", "permute",
        "unsqueeze", "squeeze", "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "narrow",
        "lift_fresh", "chunk", "diagonal", "unfold", "view_as_real", "flatten", "empty", "empty_like", "new_empty",
        "empty_strided", "new_empty_strided", "_local_scalar_dense", "is_pinned",
        "_indices", "_values", "_sparse_coo_tensor_with_dims_and_tensors",
    )
)  # fmt: skip
"""Ops that touch no element: they cost host time only."""

_TRANSFERS = ("aten::_to_copy", "aten::copy_")
_ELSEWHERE = ("cuda::", "c10d::", "_c10d_functional::")  # synchronisation, and collectives, which gloo's thread runs
_FOREACH = "aten::_foreach_"
# CUDA's op -> the CPU's, where arguments and shapes are the same
_RENAMED = {
    "aten::cudnn_batch_norm": "aten::native_batch_norm",
    "aten::cudnn_batch_norm_backward": "aten::native_batch_norm_backward",
    "aten::cudnn_convolution": "aten::convolution",
    "aten::_scaled_dot_product_efficient_attention": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable": "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def make_cpu_ops(signature: Signature) -> tuple[Signature, ...]:
    """What the CPU runs for an op of the capture; nothing for views, transfers, synchronisation and collectives."""
    name = signature.name
    if name in VIEWS or name.startswith(_ELSEWHERE) or _is_transfer(signature):
        return ()
    if name.startswith(_FOREACH):
        return _split_foreach(signature)
    if name == "aten::native_dropout":
        return _replace_dropout(signature)
    if name == "aten::native_dropout_backward":
        return (_replace_elementwise("mul", signature.inputs[:1] * 2, signature.outputs[0]),)
    return (replace(signature, name=_RENAMED.get(name, name)),)


def runs_no_kernel(signature: Signature) -> bool:
    """Whether an op that the CPU runs touches no element: to zero a sparse gradient is to forget its rows."""
    return signature.name == "aten::zero_" and signature.scalar("self_layout") == "sparse_coo"


def _is_transfer(signature: Signature) -> bool:
    """A copy between host and GPU: on a CPU the tensor is there already."""
    places = {spec.device.partition(":")[0] for spec in (*signature.inputs, *signature.outputs)}
    return signature.name in _TRANSFERS and len(places) > 1


def _split_foreach(signature: Signature) -> tuple[Signature, ...]:
    """Optimizers on a CPU loop over their parameters."""
    counts = [count for _, count in signature.groups]
    many = max(counts, default=0)
    if not many:
        return ()
    starts = [sum(counts[:position]) for position in range(len(counts))]
    name = "aten::" + signature.name.removeprefix(_FOREACH)
    scalars = tuple((key, value) for key, value in signature.scalars if key != "scalars")
    ops = []
    for index in range(many):
        inputs = tuple(
            signature.inputs[start + (index if count == many else 0)]
            for start, count in zip(starts, counts, strict=True)
            if count
        )
        groups = tuple((group, 1) for group, count in signature.groups if count)
        ops.append(Signature(name, inputs, inputs[:1], _count_numbers(scalars), groups, signature.overload))
    return tuple(ops)


def _count_numbers(scalars: tuple[tuple[str, Scalar], ...]) -> tuple[tuple[str, Scalar], ...]:
    return tuple((key, value) for key, value in scalars if isinstance(value, (int, float)))


def _replace_dropout(signature: Signature) -> tuple[Signature, ...]:
    """A mask drawn, scaled in place, and applied."""
    spec = signature.inputs[0]
    return (
        _replace_elementwise("bernoulli_", (spec,), spec),
        _replace_elementwise("div_", (spec,), spec),
        _replace_elementwise("mul", (spec, spec), spec),
    )


def _replace_elementwise(name: str, inputs: tuple[TensorSpec, ...], output: TensorSpec) -> Signature:
    return Signature(f"aten::{name}", inputs, (output,), (), tuple(("", 1) for _ in inputs))
