"""The parts of T5 that Switch Transformer is made of, with Hugging Face's eager op order."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

BUCKETS = 32
MAX_DISTANCE = 128


class RmsNorm(nn.Module):
    """Scale by the root mean square, in fp32, without subtracting the mean."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


def make_encoder_mask(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers to add to the scores, [batch, 1, 1, length]."""
    present = torch.ones(ids.shape, device=ids.device)[:, None, None, :].to(dtype)
    return (1.0 - present) * torch.finfo(dtype).min


def make_decoder_mask(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal numbers to add to the scores, [batch, 1, length, length]."""
    batch, length = ids.shape
    order = torch.arange(length, device=ids.device)
    causal = order[None, None, :].repeat(batch, length, 1) <= order[None, :, None]
    present = torch.ones(ids.shape, device=ids.device)
    both = causal.to(present.dtype)[:, None, :, :] * present[:, None, None, :]
    return (1.0 - both.to(dtype)) * torch.finfo(dtype).min


def _assign_position_buckets(relative: torch.Tensor, *, bidirectional: bool) -> torch.Tensor:
    """Which of the learned biases a relative position uses: exact when near, logarithmic when far."""
    buckets = BUCKETS
    base: torch.Tensor | int = 0
    if bidirectional:
        buckets //= 2
        base = (relative > 0).to(torch.int64) * buckets
        relative = torch.abs(relative)
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = buckets // 2
    near = relative < exact
    scaled = torch.log(relative.float() / exact) / math.log(MAX_DISTANCE / exact) * (buckets - exact)
    far = exact + scaled.to(torch.int64)
    far = torch.min(far, torch.full_like(far, buckets - 1))
    return base + torch.where(near, relative, far)


class Attention(nn.Module):
    """Norm, attention of `x` over `memory` with an additive bias, residual."""

    def __init__(
        self, size: int, *, heads: int, head_dim: int, dropout: float, relative: bool = False,
        bidirectional: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        inner = heads * head_dim
        self.num_heads, self.bidirectional = heads, bidirectional
        self.norm = RmsNorm(size)
        self.query, self.key, self.value = (nn.Linear(size, inner, bias=False) for _ in range(3))
        self.output = nn.Linear(inner, size, bias=False)
        self.relative_bias = nn.Embedding(BUCKETS, heads) if relative else None
        self.attention_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.num_heads, self.query.out_features // self.num_heads).transpose(1, 2)

    def _bias(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length, keys = scores.shape[2:]
        if self.relative_bias is None:
            bias = torch.zeros((1, self.num_heads, length, keys), device=scores.device, dtype=scores.dtype)
        else:
            order = torch.arange(length, dtype=torch.int64, device=scores.device)[:, None]
            relative = torch.arange(keys, dtype=torch.int64, device=scores.device)[None, :] - order
            values = self.relative_bias(_assign_position_buckets(relative, bidirectional=self.bidirectional))
            bias = values.permute([2, 0, 1]).unsqueeze(0)
        return bias + mask

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New hidden states, and the bias for the next layers (computed by the first one)."""
        normed = self.norm(x)
        source = normed if memory is x else memory
        query = self._heads(self.query(normed))
        key, value = self._heads(self.key(source)), self._heads(self.value(source))
        scores = torch.matmul(query, key.transpose(3, 2))
        if bias is None:
            bias = self._bias(scores, mask)
        scores += bias
        weights = self.attention_dropout(F.softmax(scores.float(), dim=-1).type_as(scores))
        context = torch.matmul(weights, value).transpose(1, 2).contiguous()
        context = context.view(x.shape[0], -1, self.output.in_features)
        return x + self.dropout(self.output(context)), bias
