"""BERT as its example trains it, attention op by op: pre-training with scores of masked tokens only, and SQuAD."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 30528  # padded to a multiple of 8
MASKED = 0.15  # share of tokens to be guessed


class Dimensions(NamedTuple):
    """Sizes of a BERT."""

    layers: int
    size: int
    heads: int
    inner: int


BASE, LARGE = Dimensions(12, 768, 12, 3072), Dimensions(24, 1024, 16, 4096)


@torch.library.custom_op("apex::fused_layer_norm_affine_fwd", mutates_args=())
def _normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, normalized_shape: list[int], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("an op without values")


@torch.library.custom_op("apex::fused_layer_norm_affine_bwd", mutates_args=())
def _normalise_back(
    grad: torch.Tensor, mean: torch.Tensor, invvar: torch.Tensor, x: torch.Tensor, normalized_shape: list[int],
    weight: torch.Tensor, bias: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    raise NotImplementedError("an op without values")


@_normalise.register_fake
def _make_normal(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, normalized_shape: list[int], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.new_empty(x.numel() // weight.numel(), dtype=torch.float32)
    return torch.empty_like(x), rows, torch.empty_like(rows)


@_normalise_back.register_fake
def _make_gradients(
    grad: torch.Tensor, mean: torch.Tensor, invvar: torch.Tensor, x: torch.Tensor, normalized_shape: list[int],
    weight: torch.Tensor, bias: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, shape, eps = inputs
    ctx.shape, ctx.eps = shape, eps
    ctx.save_for_backward(output[1], output[2], x, weight, bias)


def _find_gradients(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
    mean, invvar, x, weight, bias = ctx.saved_tensors
    return (*_normalise_back(grad.contiguous(), mean, invvar, x, ctx.shape, weight, bias, ctx.eps), None, None)


_normalise.register_autograd(_find_gradients, setup_context=_keep)


class FusedLayerNorm(nn.Module):
    """Apex's, which the example takes whatever its PyTorch: one kernel forward, weights' gradients over all SMs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows with mean 0 and variance 1, scaled and shifted."""
        out: torch.Tensor = _normalise(x, self.weight, self.bias, [self.weight.numel()], 1e-12)[0]
        return out


class Embeddings(nn.Module):
    """Word, position and token type embeddings."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(rows, size) for rows in (VOCABULARY, 512, 2))
        self.norm, self.dropout = FusedLayerNorm(size), nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, length, size]."""
        positions = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0).expand_as(tokens)
        embedded = self.words(tokens) + self.positions(positions) + self.types(types)
        out: torch.Tensor = self.dropout(self.norm(embedded))
        return out


class Attention(nn.Module):
    """Products of all heads with a softmax between; keys are transposed in one go."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        size, self.heads, self.scale = sizes.size, sizes.heads, math.sqrt(sizes.size // sizes.heads)
        self.query, self.key, self.value, self.dense = (nn.Linear(size, size) for _ in range(4))
        self.dropout, self.hidden_dropout, self.norm = nn.Dropout(0.1), nn.Dropout(0.1), FusedLayerNorm(size)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        query = self._heads(self.query(x)).permute(0, 2, 1, 3)
        key, value = self._heads(self.key(x)).permute(0, 2, 3, 1), self._heads(self.value(x)).permute(0, 2, 1, 3)
        scores = torch.matmul(query, key) / self.scale
        weights = self.dropout(F.softmax(scores + mask, dim=-1))
        mixed = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous().view(x.shape)
        out: torch.Tensor = self.norm(self.hidden_dropout(self.dense(mixed)) + x)
        return out


class Layer(nn.Module):
    """Attention and two GEMMs with GELU between, each with residual and norm."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.grow, self.shrink = nn.Linear(sizes.size, sizes.inner), nn.Linear(sizes.inner, sizes.size)
        self.dropout, self.norm = nn.Dropout(0.1), FusedLayerNorm(sizes.size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        x = self.attention(x, mask)
        out: torch.Tensor = self.norm(self.dropout(self.shrink(F.gelu(self.grow(x)))) + x)
        return out


class Encoder(nn.Module):
    """Embeddings, layers and the pooler, which both programs run."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes.size)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.pooler = nn.Linear(sizes.size, sizes.size)

    def forward(
        self, tokens: torch.Tensor, types: torch.Tensor, present: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [batch, length, size], and the pooled first one."""
        mask = present.unsqueeze(1).unsqueeze(2).to(self.pooler.weight.dtype)
        mask = (1.0 - mask) * -10000.0
        x = self.embeddings(tokens, types)
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


class BertForPreTraining(nn.Module):
    """BERT-large with both heads; only masked tokens are scored."""

    def __init__(self) -> None:
        super().__init__()
        size = LARGE.size
        self.encoder = Encoder(LARGE)
        self.next_sentence = nn.Linear(size, 2)
        self.transform, self.norm = nn.Linear(size, size), FusedLayerNorm(size)
        self.decoder = nn.Linear(size, VOCABULARY)
        self.decoder.weight = self.encoder.embeddings.words.weight

    def forward(
        self, tokens: torch.Tensor, types: torch.Tensor, present: torch.Tensor, masked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the tokens numbered by `masked`, and of the two sentence relations."""
        x, pooled = self.encoder(tokens, types, present)
        relation = self.next_sentence(pooled)
        chosen = torch.index_select(x.view(-1, x.size(-1)), 0, masked)
        return self.decoder(self.norm(F.gelu(self.transform(chosen)))), relation


class BertForQuestionAnswering(nn.Module):
    """The encoder with scores of where an answer starts and ends (SQuAD)."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        self.encoder, self.outputs = Encoder(sizes), nn.Linear(sizes.size, 2)

    def forward(
        self, tokens: torch.Tensor, types: torch.Tensor, present: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of each token as the start and as the end."""
        x, _ = self.encoder(tokens, types, present)
        start, end = self.outputs(x).split(1, dim=-1)
        return start.squeeze(-1), end.squeeze(-1)
