"""What attention gives on meta tensors before a device has chosen its kernel.

Recorded is PyTorch's op for back-ends of one's own, `_scaled_dot_product_fused_attention_overrideable`: it says what is
wanted (mask, dropout, causality, fewer key heads than query heads), and lowering decides who does it.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def infer_fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Result, and the logarithms of row sums that the backward pass needs."""
    batch, heads, rows, _ = query.shape
    sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
    numbers = [query.new_empty((), dtype=torch.int64) for _ in range(2)]
    result = _make_like(query, attn_bias, value.shape[-1])
    return result, sums, None, None, rows, key.shape[2], *numbers, query.new_empty(0)


def infer_fused_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, grad_input_mask: list[bool],
    *rest: Any, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of query, key and value, and of the mask where somebody wants it."""
    grads = [_make_like(tensor, attn_bias, tensor.shape[-1]) for tensor in (query, key, value)]
    wanted = attn_bias is not None and grad_input_mask[3]
    return *grads, torch.empty_like(attn_bias) if wanted and attn_bias is not None else None


def _make_like(tensor: Tensor, mask: Tensor | None, width: int) -> Tensor:
    """Flash attention keeps the layout of its operand; the memory-efficient kernel puts heads behind positions."""
    batch, heads, rows, own_width = tensor.shape
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if mask is None and tensor.dtype != torch.float32 and own_width == width and dense:
        return torch.empty_like(tensor)
    return tensor.new_empty(batch, rows, heads, width).transpose(1, 2)
