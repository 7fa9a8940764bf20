"""BERT-large as its example pre-trains it: scores of masked tokens only, attention op by op."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, SIZE, HEADS, INNER, VOCABULARY = 24, 1024, 16, 4096, 30528  # the vocabulary is padded to a multiple of 8
MASKED = 0.15  # share of tokens to be guessed


class Embeddings(nn.Module):
    """Word, position and token type embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.types = (
            nn.Embedding(VOCABULARY, SIZE), nn.Embedding(512, SIZE), nn.Embedding(2, SIZE),
        )  # fmt: skip
        self.norm, self.dropout = nn.LayerNorm(SIZE, eps=1e-12), nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, length, size]."""
        positions = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0).expand_as(tokens)
        embedded = self.words(tokens) + self.positions(positions) + self.types(types)
        out: torch.Tensor = self.dropout(self.norm(embedded))
        return out


class Attention(nn.Module):
    """Products of all heads with a softmax between; keys are transposed in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.dropout, self.hidden_dropout, self.norm = nn.Dropout(0.1), nn.Dropout(0.1), nn.LayerNorm(SIZE, eps=1e-12)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.size(0), x.size(1), HEADS, -1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        query = self._heads(self.query(x)).permute(0, 2, 1, 3)
        key, value = self._heads(self.key(x)).permute(0, 2, 3, 1), self._heads(self.value(x)).permute(0, 2, 1, 3)
        scores = torch.matmul(query, key) / math.sqrt(SIZE // HEADS)
        weights = self.dropout(F.softmax(scores + mask, dim=-1))
        mixed = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous().view(x.shape)
        out: torch.Tensor = self.norm(self.hidden_dropout(self.dense(mixed)) + x)
        return out


class Layer(nn.Module):
    """Attention and two GEMMs with GELU between, each with residual and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.grow, self.shrink = nn.Linear(SIZE, INNER), nn.Linear(INNER, SIZE)
        self.dropout, self.norm = nn.Dropout(0.1), nn.LayerNorm(SIZE, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""
        x = self.attention(x, mask)
        out: torch.Tensor = self.norm(self.dropout(self.shrink(F.gelu(self.grow(x)))) + x)
        return out


class BertForPreTraining(nn.Module):
    """The encoder with both heads; only masked tokens are scored."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler, self.next_sentence = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2)
        self.transform, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE, eps=1e-12)
        self.decoder = nn.Linear(SIZE, VOCABULARY)
        self.decoder.weight = self.embeddings.words.weight

    def forward(
        self, tokens: torch.Tensor, types: torch.Tensor, present: torch.Tensor, masked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the tokens numbered by `masked`, and of the two sentence relations."""
        mask = present.unsqueeze(1).unsqueeze(2).to(self.pooler.weight.dtype)
        mask = (1.0 - mask) * -10000.0
        x = self.embeddings(tokens, types)
        for layer in self.layers:
            x = layer(x, mask)
        relation = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        chosen = torch.index_select(x.view(-1, SIZE), 0, masked)
        return self.decoder(self.norm(F.gelu(self.transform(chosen)))), relation
