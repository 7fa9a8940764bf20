"""Transformer-XL of its example: relative attention over a memory of the last segment, adaptive or full softmax."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

CUTOFFS = (0, 19997, 39997, 199997, 267735)  # of the vocabulary: the shortlist and three clusters
SHARES = (0.935, 0.03, 0.032, 0.003)  # assumed of running words of WikiText-103: how many fall into each cluster


class Dimensions(NamedTuple):
    """Sizes of a Transformer-XL; `length` tokens of a segment and of its memory. Vectors of every further cluster of
    words are `divided` times as short."""

    layers: int
    size: int
    heads: int
    inner: int
    length: int
    dropout: float
    weights_dropout: float
    divided: int = 1


BASE = Dimensions(16, 512, 8, 2048, 192, 0.1, 0.0)
LARGE = Dimensions(18, 1024, 16, 4096, 256, 0.2, 0.2)
LARGE_PUBLISHED = LARGE._replace(length=384, divided=4)


class RelativeAttention(nn.Module):
    """Content and position scores, added; queries are the segment, keys the memory and the segment."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        size, self.heads = sizes.size, sizes.heads
        self.qkv, self.positions = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.out, self.norm = nn.Linear(size, size, bias=False), nn.LayerNorm(size)
        self.drop, self.drop_weights = nn.Dropout(sizes.dropout), nn.Dropout(sizes.weights_dropout)

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, content: torch.Tensor, position: torch.Tensor,
        mask: torch.Tensor, memory: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states [length, batch, size] in and out."""
        length, batch = x.size(0), x.size(1)
        joined = self.qkv(torch.cat([memory, x], 0))
        by_place = self.positions(places)
        query, key, value = torch.chunk(joined, 3, dim=-1)
        query = query[-length:].view(length, batch, self.heads, -1)
        reach = key.size(0)
        key, value = key.view(reach, batch, self.heads, -1), value.view(reach, batch, self.heads, -1)
        by_place = by_place.view(reach, self.heads, -1)
        by_content = torch.einsum("ibnd,jbnd->bnij", query + content, key)
        relative = _shifted(torch.einsum("ibnd,jnd->bnij", query + position, by_place))
        scores = (by_content + relative).mul_(0.125)
        scores.masked_fill_(mask[None, None, :, :], -float("inf"))
        weights = self.drop_weights(F.softmax(scores, dim=3))
        mixed = torch.einsum("bnij,jbnd->ibnd", weights, value).contiguous().view(x.shape)
        done: torch.Tensor = self.norm(x + self.drop(self.out(mixed)))
        return done


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Every row one place further left than the row below."""
    padding = torch.zeros((x.size(0), x.size(1), x.size(2), 1), device=x.device, dtype=x.dtype)
    padded = torch.cat([padding, x], dim=3).view(x.size(0), x.size(1), x.size(3) + 1, x.size(2))
    return padded.narrow(2, 1, padded.size(2) - 1).view_as(x)


class Layer(nn.Module):
    """Attention and two GEMMs with ReLU between, each with residual and norm."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        self.attention = RelativeAttention(sizes)
        self.inner = nn.Sequential(
            nn.Linear(sizes.size, sizes.inner), nn.ReLU(inplace=True), nn.Dropout(sizes.dropout),
            nn.Linear(sizes.inner, sizes.size), nn.Dropout(sizes.dropout),
        )  # fmt: skip
        self.norm = nn.LayerNorm(sizes.size)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """Hidden states in and out."""
        x = self.attention(x, *rest)
        out: torch.Tensor = self.norm(x + self.inner(x))
        return out


class DividedWords(nn.Module):
    """Embeddings of clusters of words, shorter for rarer ones and projected to one size; the loss shares them."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        self.size = sizes.size
        widths = [sizes.size // sizes.divided**number for number in range(len(SHARES))]
        rows = [last - first for first, last in zip(CUTOFFS[:-1], CUTOFFS[1:], strict=True)]
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count, width in zip(rows, widths, strict=True))
        self.projections = nn.ParameterList(torch.zeros(sizes.size, width) for width in widths)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [length, batch, size], cluster by cluster."""
        flat = tokens.view(-1)
        embedded = torch.zeros(flat.size(0), self.size, dtype=self.projections[0].dtype, device=flat.device)
        for number, (table, projection) in enumerate(zip(self.tables, self.projections, strict=True)):
            where = _find_cluster(flat, number)
            chosen = flat.index_select(0, where) - CUTOFFS[number]
            embedded.index_copy_(0, where, F.linear(table(chosen), projection))
        return embedded.view(*tokens.shape, self.size)


def _find_cluster(target: torch.Tensor, number: int) -> torch.Tensor:
    """Places of the tokens of a cluster; as many as `SHARES` says."""
    inside = (target >= CUTOFFS[number]) & (target < CUTOFFS[number + 1])
    return torch.nonzero_static(inside, size=max(1, round(SHARES[number] * target.size(0)))).squeeze(1)


class TransformerXl(nn.Module):
    """The language model with its loss; without `adaptive` every word of the vocabulary is scored for every token."""

    def __init__(self, sizes: Dimensions = BASE, *, adaptive: bool = True) -> None:
        super().__init__()
        self.sizes, self.adaptive = sizes, adaptive
        self.words = DividedWords(sizes) if sizes.divided > 1 else nn.Embedding(CUTOFFS[-1], sizes.size)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        heads = sizes.heads, sizes.size // sizes.heads
        self.content, self.position = (nn.Parameter(torch.zeros(heads)) for _ in range(2))
        if adaptive:
            self.cluster_weight = nn.Parameter(torch.zeros(len(SHARES) - 1, sizes.size))
            self.cluster_bias = nn.Parameter(torch.zeros(len(SHARES) - 1))
        self.bias = nn.Parameter(torch.zeros(CUTOFFS[-1]))
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Losses by token, and the memory of the next segment."""
        length, size = tokens.size(0), self.sizes.size
        embedded = self.words(tokens).mul_(size**0.5)
        reach = memory.size(1) + length
        ones = embedded.new_ones(length, reach)
        mask = torch.triu(ones, diagonal=1 + memory.size(1)).bool()
        steps = torch.arange(reach - 1, -1, -1.0, device=tokens.device, dtype=embedded.dtype)
        angles = torch.outer(steps, torch.ones(size // 2, device=tokens.device, dtype=embedded.dtype))
        places = self.drop(torch.cat([angles.sin(), angles.cos()], dim=-1)[:, None, :])
        x, states = self.drop(embedded), []
        for number, layer in enumerate(self.layers):
            states.append(x.detach())
            x = layer(x, places, self.content, self.position, mask, memory[number])
        hidden = self.drop(x).view(-1, size)
        loss = self._compute_adaptive_loss if self.adaptive else self._compute_full_loss
        return loss(hidden, target.view(-1)), torch.stack(states).detach()

    def _compute_full_loss(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihoods from the scores of all words."""
        weight: torch.Tensor = self.words.weight  # type: ignore[assignment]
        chances = F.log_softmax(F.linear(hidden, weight, self.bias), dim=-1)
        return -chances.gather(1, target.unsqueeze(1)).squeeze(1)

    def _score_words(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """Scores of the words of a cluster; the first one's also has those of the other clusters."""
        bias = self.bias[CUTOFFS[number] : CUTOFFS[number + 1]]
        if isinstance(self.words, DividedWords):
            weight: torch.Tensor = self.words.tables[number].weight  # type: ignore[assignment]
            hidden = F.linear(hidden, self.words.projections[number].t())
        else:
            weight = self.words.weight[CUTOFFS[number] : CUTOFFS[number + 1]]
        if number == 0:
            weight = torch.cat([weight, self.cluster_weight], dim=0)
            bias = torch.cat([bias, self.cluster_bias], dim=0)
        return F.log_softmax(F.linear(hidden, weight, bias), dim=1)

    def _compute_adaptive_loss(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihoods, cluster by cluster; as many tokens fall into each as `SHARES` says."""
        by_head = self._score_words(hidden, 0)
        losses, offset = torch.zeros_like(target, dtype=hidden.dtype), 0
        for number in range(len(SHARES)):
            where = _find_cluster(target, number)
            wanted = target.index_select(0, where) - CUTOFFS[number]
            chance = by_head.index_select(0, where)
            if number == 0:
                found = chance.gather(1, wanted[:, None]).squeeze(1)
            else:
                tail = self._score_words(hidden.index_select(0, where), number)
                found = chance[:, -number] + tail.gather(1, wanted[:, None]).squeeze(1)
            losses[offset : offset + where.size(0)].copy_(-found)
            offset += where.size(0)
        return losses
