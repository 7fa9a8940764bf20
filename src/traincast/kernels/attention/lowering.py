"""Fused attention, forward and backward."""

from __future__ import annotations

from traincast.kernels.attention import ATTENTION
from traincast.kernels.operands import compute_of, required
from traincast.kernels.registry import Item, LoweringContext, lowers
from traincast.kernels.streaming.launches import elementwise, reduction
from traincast.workload.ops import Signature, TensorSpec


def _attention(kind: str, signature: Signature, first: int, compute: str) -> Item:
    """The fused kernel; `first` is the position of the query. `_scaled_*` ops put heads before positions."""
    query = required(signature, "query", first)
    key = required(signature, "key", first + 1)
    heads, positions = (1, 2) if signature.name.startswith("aten::_scaled") else (2, 1)
    return ATTENTION.call(
        kind,
        compute,
        batch=query.shape[0],
        q_heads=query.shape[heads],
        kv_heads=key.shape[heads],
        q_len=query.shape[positions],
        kv_len=key.shape[positions],
        head_dim=query.shape[-1],
        causal=int(_is_causal(signature)),
    )


def _is_causal(signature: Signature) -> bool:
    mask_type = signature.scalar("custom_mask_type", 0)
    return bool(signature.scalar("is_causal", False)) or (isinstance(mask_type, int) and mask_type > 0)


@lowers(
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward",
)  # fmt: skip
def forward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """One kernel."""
    return (_attention("forward", signature, 0, compute_of(signature.inputs[0])),)


@lowers(
    "aten::_scaled_dot_product_flash_attention_backward", "aten::_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_cudnn_attention_backward",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
)  # fmt: skip
def flash_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """Row sums of gradient times output, the fused kernel, and the query's gradient rounded from fp32."""
    grad, query = signature.inputs[0], required(signature, "query", 1)
    main = _attention("backward", signature, 1, compute_of(query))
    exact = TensorSpec(query.shape, query.stride, "float32", query.device)
    return (_row_sums(grad), main, elementwise("copy", (exact,), (query,)))


@lowers("aten::_scaled_dot_product_efficient_attention_backward", "aten::_efficient_attention_backward")
def efficient_backward(signature: Signature, context: LoweringContext) -> tuple[Item, ...]:
    """The fused kernel; in fp32 the row sums of gradient times output come first, in two kernels."""
    grad, query = signature.inputs[0], required(signature, "query", 1)
    main = _attention("backward", signature, 1, compute_of(query))
    if query.itemsize < 4:
        return (main,)
    return (elementwise("mul", (grad, grad), (grad,)), reduction("inner", grad, (_rows(grad),)), main)


def _rows(grad: TensorSpec) -> TensorSpec:
    rows = grad.numel // max(1, grad.shape[-1])
    return TensorSpec((rows,), (1,), "float32", grad.device)


def _row_sums(grad: TensorSpec) -> Item:
    return reduction("inner", grad, (_rows(grad),), extra_read=grad.nbytes)
