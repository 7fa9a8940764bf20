"""The original Transformer, base size: encoder and decoder of six layers, post-norm, shared embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.sizes import LanguageModelSizes


class Attention(nn.Module):
    """Multi-head attention of `x` over `memory`, causal or not, without biases."""

    def __init__(self, config: LanguageModelSizes, *, causal: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.kind, self.rate, self.causal = config.num_heads, config.attention, config.dropout, causal
        self.query, self.key, self.value, self.output = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.dropout = nn.Dropout(config.dropout)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, blocked: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [batch, length, size]; `blocked` marks the scores that are masked out."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(memory)), self._heads(self.value(memory))
        if self.kind == "sdpa":
            rate = self.rate if self.training else 0.0
            context = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=self.causal)
        else:
            scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[-1])
            if self.causal and blocked is not None:
                scores = scores.masked_fill(blocked, -math.inf)
            context = torch.matmul(self.dropout(F.softmax(scores, dim=-1)), value)
        return self.output(context.transpose(1, 2).contiguous().view(x.shape))


class FeedForward(nn.Module):
    """Linear, ReLU, linear."""

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.grow = nn.Linear(config.hidden_size, config.ffn_size)
        self.shrink = nn.Linear(config.ffn_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        return self.shrink(self.dropout(F.relu(self.grow(x))))


class Layer(nn.Module):
    """Self-attention, attention over the encoder (decoder only) and feed-forward, residual and norm after each."""

    def __init__(self, config: LanguageModelSizes, *, decoder: bool) -> None:
        super().__init__()
        self.attention = Attention(config, causal=decoder)
        self.cross = Attention(config, causal=False) if decoder else None
        self.feed_forward = FeedForward(config)
        self.norms = nn.ModuleList(nn.LayerNorm(config.hidden_size) for _ in range(3 if decoder else 2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, blocked: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        x = self.norms[0](x + self.dropout(self.attention(x, x, blocked)))
        if self.cross is not None and memory is not None:
            x = self.norms[1](x + self.dropout(self.cross(x, memory, None)))
        return self.norms[-1](x + self.dropout(self.feed_forward(x)))


class Transformer(nn.Module):
    """Source and target token ids to scores over the shared vocabulary."""

    positions: torch.Tensor

    def __init__(self, config: LanguageModelSizes) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("positions", torch.empty(config.max_seq_len, config.hidden_size))
        self.encoder = nn.ModuleList(Layer(config, decoder=False) for _ in range(config.num_layers))
        self.decoder = nn.ModuleList(Layer(config, decoder=True) for _ in range(config.num_layers))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        scaled = self.tokens(ids) * math.sqrt(self.config.hidden_size)
        return self.dropout(scaled + self.positions[: ids.shape[1]])

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scores [batch, length, vocab]."""
        length = target.shape[1]
        blocked = None
        if self.config.attention == "eager":
            blocked = torch.ones((length, length), dtype=torch.bool, device=target.device).triu(1)
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory, blocked)
        return self.head(x)


def compute_label_smoothed_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy with label smoothing 0.1."""
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), labels.view(-1), label_smoothing=0.1)
