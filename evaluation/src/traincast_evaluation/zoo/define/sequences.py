"""Recommenders that read behaviour as a sequence: HSTU (generative recommenders), and a Transformer like OneTrans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.embeddings import FbgemmTables
from traincast_evaluation.zoo.define.jagged import ToJagged, ToPadded
from traincast_evaluation.zoo.define.recommenders import Recommender, TableSet


@dataclass(frozen=True, kw_only=True, slots=True)
class HstuConfig:
    """Sizes of the public generative-recommenders code for MovieLens, with half the layers of its largest model and a
    larger catalogue of items."""

    items: int = 10_000_000
    width: int = 256
    layers: int = 8
    heads: int = 8
    head_dim: int = 32
    longest: int = 4096
    negatives: int = 128


class HstuLayer(nn.Module):
    """Pointwise attention without softmax over one user's actions, gated: rows are jagged, attention is padded."""

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self.heads, self.inner = config.heads, config.heads * config.head_dim
        self.uvqk = nn.Parameter(torch.empty(config.width, 4 * self.inner))
        self.distances = nn.Parameter(torch.empty(2 * config.longest - 1))
        self.out = nn.Linear(self.inner, config.width)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, length: int, mask: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, width] to the same."""
        mixed = F.silu(torch.mm(F.layer_norm(x, x.shape[-1:]), self.uvqk))
        u, v, q, k = torch.split(mixed, [self.inner] * 4, dim=1)
        q, k, v = (ToPadded.apply(part, offsets, length) for part in (q, k, v))
        q, k, v = (part.view(part.shape[0], length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) + self._bias(length)
        weights = F.silu(scores) / length * mask
        attended = torch.matmul(weights, v).transpose(1, 2).reshape(q.shape[0], length, self.inner)
        rows = ToJagged.apply(attended, offsets, x.shape[0])
        result: torch.Tensor = self.out(u * F.layer_norm(rows, rows.shape[-1:])) + x
        return result

    def _bias(self, length: int) -> torch.Tensor:
        """A learned number for every distance between two actions, [length, length]."""
        spread = F.pad(self.distances[: 2 * length - 1], [0, length]).repeat(length)
        rows = spread[: length * (3 * length - 2)].reshape(length, 3 * length - 2)
        return rows[:, length - 1 : 2 * length - 1]


class Hstu(Recommender):
    """Item embeddings without pooling, layers of jagged attention, and a sampled softmax over the next item."""

    def __init__(self, optimizer: str, config: HstuConfig | None = None) -> None:
        super().__init__()
        config = config or HstuConfig()
        self.config = config
        self.items = FbgemmTables(
            TableSet(rows_per_table=(config.items,), embedding_dim=config.width, optimizer=optimizer)
        )
        self.places = nn.Embedding(config.longest, config.width)
        self.layers = nn.ModuleList(HstuLayer(config) for _ in range(config.layers))

    def forward(
        self, indices: torch.Tensor, starts: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Scores [tokens, 1 + negatives] of the item that followed and of others. `indices` are the actions, then the
        items to score; `starts` one bag each; `offsets` the sequences; `mask` [length, length] is 1 for the past."""
        tokens, length = places.shape[0], mask.shape[0]
        rows = self.items(indices, starts).squeeze(1)
        x = rows[:tokens] * self.config.width**0.5 + self.places(places)
        for layer in self.layers:
            x = layer(x, offsets, length, mask)
        x = F.normalize(x, dim=-1)
        scored = F.normalize(rows[tokens:], dim=-1)
        followed, others = scored[:tokens], scored[tokens:]
        near = (x * followed).sum(dim=1, keepdim=True)
        return torch.cat([near, torch.mm(x, others.t())], dim=1) / 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class OneTransConfig:
    """A Transformer over behaviour and features in one sequence, sizes of a small model of the paper's family."""

    items: int = 10_000_000
    features: tuple[int, ...] = (1_000_000,) * 32
    width: int = 256
    layers: int = 6
    heads: int = 4
    longest: int = 4096


class OneTransLayer(nn.Module):
    """Causal attention and a feed-forward block; behaviour shares its weights, every feature token has its own."""

    def __init__(self, config: OneTransConfig) -> None:
        super().__init__()
        count, width = len(config.features), config.width
        self.heads = config.heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.shared = nn.Linear(width, 3 * width)
        self.own = nn.Parameter(torch.empty(count, width, 3 * width))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.own_up, self.own_down = (
            nn.Parameter(torch.empty(count, *shape)) for shape in ((width, 4 * width), (4 * width, width))
        )

    def forward(self, behaviour: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, length, width] and [batch, features, width] to the same."""
        length = behaviour.shape[1]
        x = torch.cat([behaviour, features], dim=1)
        attended = self.out(self._attend(self.norm(x), length)) + x
        inner = self.norm2(attended)
        shared = self.down(F.gelu(self.up(inner[:, :length])))
        own = self._own(F.gelu(self._own(inner[:, length:], self.own_up)), self.own_down)
        return attended[:, :length] + shared, attended[:, length:] + own

    def _own(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Each token through its own weights."""
        return torch.bmm(tokens.transpose(0, 1), weights).transpose(0, 1)

    def _attend(self, x: torch.Tensor, length: int) -> torch.Tensor:
        mixed = torch.cat([self.shared(x[:, :length]), self._own(x[:, length:], self.own)], dim=1)
        batch, tokens, _ = mixed.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, tokens, -1)


class OneTrans(Recommender):
    """Behaviour as tokens, features as tokens, one causal Transformer over both; a click from the feature tokens."""

    def __init__(self, optimizer: str, config: OneTransConfig | None = None) -> None:
        super().__init__()
        config = config or OneTransConfig()
        self.items = FbgemmTables(
            TableSet(rows_per_table=(config.items,), embedding_dim=config.width, optimizer=optimizer)
        )
        self.tables = FbgemmTables(
            TableSet(rows_per_table=config.features, embedding_dim=config.width, optimizer=optimizer)
        )
        self.places = nn.Embedding(config.longest, config.width)
        self.layers = nn.ModuleList(OneTransLayer(config) for _ in range(config.layers))
        self.over = nn.Linear(len(config.features) * config.width, 1)

    def forward(
        self, items: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Logits [batch, 1]; `items` and `starts` one bag per action, `places` [length]."""
        features = self.tables(indices, offsets)
        behaviour = self.items(items, starts).view(features.shape[0], places.shape[0], -1) + self.places(places)
        for layer in self.layers:
            behaviour, features = layer(behaviour, features)
        logits: torch.Tensor = self.over(features.flatten(1))
        return logits
