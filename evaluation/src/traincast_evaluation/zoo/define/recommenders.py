"""Recommenders alongside DLRM: DeepFM, Wide & Deep, DIN and NCF, each after the code or paper it is known by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from traincast.models.dlrm.config import CRITEO_ROWS, RESIDENT_ROWS_CAP
from traincast_evaluation.zoo.define.dlrm import make_mlp
from traincast_evaluation.zoo.define.embeddings import FbgemmTables

DENSE_FEATURES = 13
"""Numbers alongside the tables in the Criteo data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSet:
    """Tables of one width behind one FBGEMM lookup. `resident_rows` caps the rows that occupy device memory."""

    rows_per_table: tuple[int, ...]
    embedding_dim: int
    optimizer: str
    resident_rows: int = RESIDENT_ROWS_CAP

    @property
    def num_tables(self) -> int:
        """How many."""
        return len(self.rows_per_table)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each that occupy device memory."""
        return tuple(min(rows, self.resident_rows) for rows in self.rows_per_table)

    @property
    def parameters(self) -> int:
        """Every row counted."""
        return sum(self.rows_per_table) * self.embedding_dim


class Recommender(nn.Module):
    """A model with fused tables, which update themselves in the backward pass."""

    def dense_parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps."""
        tables = [module for module in self.modules() if isinstance(module, FbgemmTables)]
        fused = {id(parameter) for table in tables for parameter in table.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in fused]


class DeepFM(Recommender):
    """As TorchRec's SimpleDeepFMNN: a factorization machine and an MLP over the same embeddings, side by side."""

    def __init__(self, optimizer: str, *, dim: int = 64, hidden: int = 512, deep: int = 64) -> None:
        super().__init__()
        self.tables = FbgemmTables(TableSet(rows_per_table=CRITEO_ROWS, embedding_dim=dim, optimizer=optimizer))
        self.dense = make_mlp((DENSE_FEATURES, hidden, dim))
        self.deep = make_mlp(((len(CRITEO_ROWS) + 1) * dim, hidden, hidden, deep))
        self.over = nn.Linear(dim + deep + 1, 1)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1]."""
        numbers = self.dense(dense)
        features = torch.cat([numbers.unsqueeze(1), self.tables(indices, offsets)], dim=1)
        total = features.sum(dim=1)
        pairs = 0.5 * (total * total - (features * features).sum(dim=1)).sum(dim=1, keepdim=True)
        deep = self.deep(features.flatten(1))
        logits: torch.Tensor = self.over(torch.cat([numbers, deep, pairs], dim=1))
        return logits


class WideAndDeep(Recommender):
    """A sum of weights, one a feature, alongside an MLP of three layers over embeddings (Cheng et al., 2016).

    The weights are tables of four columns, the least that FBGEMM has, of which one is used.
    """

    def __init__(self, optimizer: str, *, dim: int = 32) -> None:
        super().__init__()
        self.wide = FbgemmTables(TableSet(rows_per_table=CRITEO_ROWS, embedding_dim=4, optimizer=optimizer))
        self.tables = FbgemmTables(TableSet(rows_per_table=CRITEO_ROWS, embedding_dim=dim, optimizer=optimizer))
        self.deep = make_mlp((DENSE_FEATURES + len(CRITEO_ROWS) * dim, 1024, 512, 256))
        self.over = nn.Linear(256, 1)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1]."""
        weights = self.wide(indices, offsets)[:, :, 0].sum(dim=1, keepdim=True)
        embedded = self.tables(indices, offsets).flatten(1)
        logits: torch.Tensor = self.over(self.deep(torch.cat([dense, embedded], dim=1))) + weights
        return logits


DIN_ROWS = (10_000_000, 100_000)
"""Items and categories of a large shop."""


class ActivationUnit(nn.Module):
    """How much each thing of a history matters for the one on offer: an MLP over both, their difference and product."""

    def __init__(self, width: int, hidden: Sequence[int] = (80, 40)) -> None:
        super().__init__()
        self.layers = make_mlp((4 * width, *hidden))
        self.score = nn.Linear(hidden[-1], 1)

    def forward(self, offered: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """[batch, width] and [batch, length, width] to scores [batch, 1, length]."""
        query = offered.unsqueeze(1).expand_as(history)
        both = torch.cat([query, history, query - history, query * history], dim=-1)
        scores: torch.Tensor = self.score(self.layers(both))
        return scores.transpose(1, 2)


class Din(Recommender):
    """Deep Interest Network (Zhou et al., 2018): unpooled embeddings of a history, weighted by what is on offer."""

    def __init__(self, optimizer: str, *, dim: int = 64) -> None:
        super().__init__()
        self.tables = FbgemmTables(TableSet(rows_per_table=DIN_ROWS, embedding_dim=dim, optimizer=optimizer))
        width = len(DIN_ROWS) * dim
        self.unit = ActivationUnit(width)
        self.deep = make_mlp((3 * width, 200, 80))
        self.over = nn.Linear(80, 1)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1]. The history and what is on offer are looked up together, one row each; `mask` is 0 where a
        history has ended, [batch, length]."""
        rows = self.tables(indices, offsets).flatten(1)
        rows = rows.view(mask.shape[0], mask.shape[1] + 1, -1)
        offered, history = rows[:, 0], rows[:, 1:]
        scores = self.unit(offered, history) * mask.unsqueeze(1)
        interest = torch.bmm(scores, history).squeeze(1)
        logits: torch.Tensor = self.over(self.deep(torch.cat([offered, interest, offered * interest], dim=1)))
        return logits


NCF_USERS, NCF_ITEMS = 138_493, 26_744
"""MovieLens 20M, as MLPerf trained it."""


class Ncf(Recommender):
    """Neural collaborative filtering (NeuMF) as MLPerf trained it: dense gradients of four nn.Embedding tables."""

    def __init__(self, *, factors: int = 64, layers: Sequence[int] = (256, 256, 128, 64)) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(NCF_USERS, factors), nn.Embedding(NCF_ITEMS, factors)
        self.deep_user = nn.Embedding(NCF_USERS, layers[0] // 2)
        self.deep_item = nn.Embedding(NCF_ITEMS, layers[0] // 2)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in zip(layers, layers[1:], strict=False))
        self.over = nn.Linear(factors + layers[-1], 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1]."""
        product = self.user(user) * self.item(item)
        x = torch.cat([self.deep_user(user), self.deep_item(item)], dim=1)
        for layer in self.layers:
            x = F.relu(layer(x))
        logits: torch.Tensor = self.over(torch.cat([product, x], dim=1))
        return logits
