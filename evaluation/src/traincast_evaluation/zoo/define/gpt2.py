"""GPT-2 with Hugging Face's eager op order (Conv1D projections, masked scores by `where`, tanh GELU in parts)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.sizes import LanguageModelSizes
from traincast_evaluation.zoo.define.views import slice_leading


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out], applied with `addmm` on the flattened input."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_in, fan_out))
        self.bias = nn.Parameter(torch.empty(fan_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], flat.shape[-1])


def apply_gelu_new(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of GELU, one kernel per arithmetic step."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Attention(nn.Module):
    """Causal multi-head attention."""

    causal: torch.Tensor

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        size, longest = config.hidden_size, config.max_seq_len
        self.num_heads, self.size, self.kind, self.rate = config.num_heads, size, config.attention, config.dropout
        self.qkv = Conv1D(size, 3 * size)
        self.projection = Conv1D(size, size)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        causal = torch.ones((longest, longest), dtype=torch.bool).tril().view(1, 1, longest, longest)
        self.register_buffer("causal", causal, persistent=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)

    def _eager(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / torch.full([], value.shape[-1] ** 0.5, dtype=scores.dtype, device=scores.device)
        allowed = slice_leading(slice_leading(self.causal, 2, query.shape[-2]), 3, key.shape[-2])
        lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        scores = torch.where(allowed, scores.to(scores.dtype), lowest)
        weights = F.softmax(scores, dim=-1).type(value.dtype)
        return torch.matmul(self.attention_dropout(weights), value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, length, size]."""
        query, key, value = (self._heads(part) for part in self.qkv(x).split(self.size, dim=2))
        if self.kind == "sdpa":
            rate = self.rate if self.training else 0.0
            context = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        else:
            context = self._eager(query, key, value)
        merged = context.permute(0, 2, 1, 3).contiguous().view(x.shape)
        return self.dropout(self.projection(merged))


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm_1, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(config)
        self.grow, self.shrink = Conv1D(size, 4 * size), Conv1D(4 * size, size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        x = self.attention(self.norm_1(x)) + x
        return x + self.dropout(self.shrink(apply_gelu_new(self.grow(self.norm_2(x)))))


class Gpt2(nn.Module):
    """GPT-2 with its language model head (tied to the token embeddings)."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        size = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, size)
        self.positions = nn.Embedding(config.max_seq_len, size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Scores [batch, length, vocab]."""
        input_ids = input_ids.view(-1, input_ids.shape[-1])
        positions = torch.arange(input_ids.shape[-1], dtype=torch.int64, device=input_ids.device).unsqueeze(0)
        x = self.dropout(self.tokens(input_ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).view(x.shape))


def compute_causal_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token given those before it."""
    shifted = scores[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), targets.view(-1))
