"""Attention before a device has chosen its kernel, and `flex_attention`, which only compiled functions fuse.

Recorded is PyTorch's op for back-ends of one's own, `_scaled_dot_product_fused_attention_overrideable`: it says what is
wanted (mask, dropout, causality, fewer key heads than query heads), and lowering decides who does it.
"""

from __future__ import annotations

from typing import Any

import torch

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.compilation import CompiledRegions

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


aten = torch.ops.aten
_SAMPLES = 48  # rows and columns of the mask that are looked at
_DENSE = 0.9  # of the mask: from here on no block worth naming is skipped


def is_flex(func: Any) -> bool:
    """Whether a function is the operator behind `run_flex_attention`."""
    return isinstance(func, torch._ops.HigherOrderOperator) and func._name == "flex_attention"


def run_flex_attention(
    regions: CompiledRegions, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: tuple[Any, ...],
    scale: float, *rest: Any, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Result, logarithms of row sums and maxima. A mask that is not causal counts as attention to as many keys as a row
    sees on average; one that depends on unknown values counts as attention to all, which the result says."""
    sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    if not regions.inside:
        gqa = query.shape[1] != key.shape[1]
        out = aten._scaled_dot_product_attention_math(
            query, key, value, None, 0.0, False, None, scale=scale, enable_gqa=gqa
        )[0]
        return out, sums, sums
    causal, share = _sample_mask(block_mask[-1], query.shape[2], key.shape[2])
    if not causal and share < _DENSE:
        rows = max(1, round(share * key.shape[2]))
        key, value = key[:, :, :rows], value[:, :, :rows]
    made = aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, None, 0.0, causal, False, scale=scale
    )
    return made[0], made[1], sums


def _sample_mask(mask: Any, queries: int, keys: int) -> tuple[bool, float]:
    """Whether a mask is causal, and the share of keys that a row sees, from a grid of samples."""
    rows, columns = (torch.linspace(0, n - 1, min(n, _SAMPLES)).long() for n in (queries, keys))
    first = torch.zeros((), dtype=torch.long)
    with torch._C._DisableTorchDispatch():
        try:
            kept = mask(first, first, rows[:, None], columns[None]).expand(len(rows), len(columns))
            if kept.is_meta:
                return _describe_full_mask()
            lower = columns[None] <= rows[:, None]
            return bool((kept == lower).all()), float(kept.double().mean())
        except (RuntimeError, ValueError, IndexError, TypeError):
            return _describe_full_mask()  # it asks for tensors of the device


def _describe_full_mask() -> tuple[bool, float]:
    get_assumptions().note_assumption("the mask of flex_attention needs unknown values and is taken to hide nothing")
    return False, 1.0
