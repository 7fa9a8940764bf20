"""OPT with Hugging Face's eager op order (mask built on the device, batched `bmm`, scores clamped by `max`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.sizes import LanguageModelSizes


def _make_opt_decoder_mask(present: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal mask and padding mask as numbers to add to the scores, [batch, 1, length, length]."""
    batch, length = present.shape
    lowest = torch.finfo(dtype).min
    causal = torch.full((length, length), lowest, dtype=dtype, device=present.device)
    order = torch.arange(length, device=present.device)
    causal.masked_fill_(order < (order + 1).view(length, 1), 0)
    causal = causal[None, None, :, :].expand(batch, 1, length, length)
    hidden = 1.0 - present[:, None, None, :].expand(batch, 1, length, length).to(dtype)
    hidden = hidden.masked_fill(hidden.to(torch.bool), lowest)
    return causal.masked_fill(hidden.bool(), lowest)


class Attention(nn.Module):
    """Causal multi-head attention; heads are folded into the batch."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.kind, self.rate = config.num_heads, config.attention, config.dropout
        self.scaling = (size // config.num_heads) ** -0.5
        self.key, self.value, self.query, self.output = (nn.Linear(size, size) for _ in range(4))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2).contiguous()

    def _eager(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x) * self.scaling
        key, value = self._heads(self.key(x)), self._heads(self.value(x))
        folded = (batch * self.num_heads, length, -1)
        query, key, value = self._heads(query).view(folded), key.view(folded), value.view(folded)
        scores = torch.bmm(query, key.transpose(1, 2))
        scores = scores.view(batch, self.num_heads, length, length) + mask
        lowest = torch.tensor(torch.finfo(scores.dtype).min).to(scores.device)
        scores = torch.max(scores, lowest).view(-1, length, length)
        weights = F.dropout(F.softmax(scores, dim=-1), p=self.rate, training=self.training)
        context = torch.bmm(weights, value)
        return context.view(batch, self.num_heads, length, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [batch, length, size]."""
        if mask is not None:
            context = self._eager(x, mask)
        else:
            query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
            rate = self.rate if self.training else 0.0
            context = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True).transpose(1, 2)
        return self.output(context.reshape(x.shape))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward; the latter runs on flattened tokens."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        size = config.hidden_size
        self.rate = config.dropout
        self.attention = Attention(config)
        self.attention_norm, self.final_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.grow, self.shrink = nn.Linear(size, config.ffn_size), nn.Linear(config.ffn_size, size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        attended = self.attention(self.attention_norm(x), mask)
        x = x + F.dropout(attended, p=self.rate, training=self.training)
        flat = x.reshape(-1, x.shape[-1])
        grown = self.shrink(F.relu(self.grow(self.final_norm(flat))))
        return (flat + F.dropout(grown, p=self.rate, training=self.training)).view(x.shape)


class Opt(nn.Module):
    """OPT with its language model head (tied to the token embeddings)."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=1)
        # positions start at 2, a habit of the original code base
        self.positions = nn.Embedding(config.max_seq_len + 2, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Scores [batch, length, vocab]."""
        x = self.tokens(input_ids.view(-1, input_ids.shape[-1]))
        present = torch.ones(input_ids.shape, device=input_ids.device)
        mask = _make_opt_decoder_mask(present, x.dtype) if self.config.attention == "eager" else None
        seen = present.long()
        order = (torch.cumsum(seen, dim=1).type_as(seen) * seen).long() - 1
        x = x + self.positions(order[:, 0:] + 2)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x)).contiguous()
