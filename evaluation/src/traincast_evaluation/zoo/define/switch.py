"""Switch Transformer: a T5 encoder-decoder whose every second feed-forward is four experts (top-1 routing).

Routing decides how many tokens an expert gets, which a capture cannot know. Assumed: every expert is full, that is
it gets `expert_capacity` tokens of every sequence (so sequences of at least experts * capacity tokens).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.sizes import SwitchSizes
from traincast_evaluation.zoo.define.t5 import Attention, RmsNorm, make_decoder_mask, make_encoder_mask


class Dense(nn.Module):
    """Linear, ReLU, linear without biases."""

    def __init__(self, config: SwitchSizes) -> None:
        super().__init__()
        self.grow = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.shrink = nn.Linear(config.ffn_size, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        return self.shrink(self.dropout(F.relu(self.grow(x))))


class Router(nn.Module):
    """Top-1 routing with a capacity per expert and sequence."""

    def __init__(self, config: SwitchSizes) -> None:
        super().__init__()
        self.config = config
        self.classifier = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One-hot choice [batch, length, experts] within capacity, and the probability of the choice."""
        jitter = self.config.jitter
        if self.training:
            x = x * torch.empty_like(x).uniform_(1.0 - jitter, 1.0 + jitter)
        probabilities = F.softmax(self.classifier(x), dim=-1, dtype=x.dtype)
        chosen = torch.argmax(probabilities, dim=-1)
        # what `one_hot` runs on a GPU when the number of classes is given
        one_hot = torch.zeros(probabilities.shape, dtype=torch.int64, device=x.device)
        one_hot.scatter_(-1, chosen.unsqueeze(-1), 1)
        within = torch.cumsum(one_hot, dim=-2) <= self.config.expert_capacity
        return one_hot * within, torch.max(probabilities, dim=-1).values.unsqueeze(-1)


class Sparse(nn.Module):
    """The experts: each takes the tokens routed to it and writes its results back in place."""

    def __init__(self, config: SwitchSizes) -> None:
        super().__init__()
        self.capacity = config.expert_capacity
        self.router = Router(config)
        self.experts = nn.ModuleList(Dense(config) for _ in range(config.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        choice, probability = self.router(x)
        result = x.clone()
        for number, expert in enumerate(self.experts):
            tokens = torch.nonzero_static(choice[:, :, number].bool(), size=x.shape[0] * self.capacity)
            where = (tokens[:, 0], tokens[:, 1])
            result[where] = expert(x[where])
        return probability * result


class FeedForward(nn.Module):
    """Norm, dense or sparse feed-forward, residual."""

    def __init__(self, config: SwitchSizes, *, sparse: bool) -> None:
        super().__init__()
        self.norm = RmsNorm(config.hidden_size)
        self.mlp: nn.Module = Sparse(config) if sparse else Dense(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        return x + self.dropout(self.mlp(self.norm(x)))


class Stack(nn.Module):
    """Encoder or decoder: layers, final norm. The first layer holds the relative position bias of all."""

    def __init__(self, config: SwitchSizes, *, decoder: bool) -> None:
        super().__init__()
        self.attentions, self.crosses, self.feeds = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        attention = partial(
            Attention, config.hidden_size, heads=config.num_heads, head_dim=config.head_dim, dropout=config.dropout
        )
        for i in range(config.num_layers):
            self.attentions.append(attention(relative=i == 0, bidirectional=not decoder))
            if decoder:
                self.crosses.append(attention())
            self.feeds.append(FeedForward(config, sparse=i % config.sparse_every == 1))
        self.norm = RmsNorm(config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor,
        memory: torch.Tensor | None = None, memory_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Embedded tokens to hidden states."""
        x = self.dropout(x)
        bias = cross_bias = None
        for i, (attention, feed) in enumerate(zip(self.attentions, self.feeds, strict=True)):
            x, bias = attention(x, x, mask, bias)
            if memory is not None:
                x, cross_bias = self.crosses[i](x, memory, memory_mask, cross_bias)
            x = feed(x)
        return self.dropout(self.norm(x))


class Switch(nn.Module):
    """Encoder, decoder and language model head (tied to the token embeddings)."""

    def __init__(self, config: SwitchSizes) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scores [batch, length, vocab]."""
        dtype = self.tokens.weight.dtype
        memory = self.encoder(self.tokens(source), make_encoder_mask(source, dtype))
        x = self.tokens(target)
        x = self.decoder(x, make_decoder_mask(target, dtype), memory, make_encoder_mask(source, dtype))
        return self.head(x * self.config.hidden_size**-0.5)
