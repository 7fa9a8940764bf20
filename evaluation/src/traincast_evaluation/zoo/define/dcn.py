"""DLRM with the DCNv2 interaction of MLPerf v3.0 and later (low-rank cross network), as TorchRec builds it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from traincast.models.dlrm.config import DcnConfig
from traincast_evaluation.zoo.define.dlrm import make_mlp
from traincast_evaluation.zoo.define.embeddings import TABLES


class LowRankCross(nn.Module):
    """x <- x0 * (W V x + b) + x, a few times."""

    def __init__(self, size: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.narrow = nn.ParameterList(nn.Parameter(torch.empty(rank, size)) for _ in range(layers))
        self.widen = nn.ParameterList(nn.Parameter(torch.empty(size, rank)) for _ in range(layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.empty(size)) for _ in range(layers))

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        """[batch, size] to the same."""
        x = first
        for narrow, widen, bias in zip(self.narrow, self.widen, self.bias, strict=True):
            crossed = F.linear(F.linear(x, narrow), widen)
            x = first * (crossed + bias) + x
        return x


class DlrmDcn(nn.Module):
    """Bottom MLP, tables, cross network over everything, top MLP that ends in a logit."""

    def __init__(self, config: DcnConfig) -> None:
        super().__init__()
        self.config = config
        self.bottom = make_mlp(config.bottom_mlp)
        self.tables = TABLES[config.embedding](config)
        self.cross = LowRankCross(config.top_input, layers=config.cross_layers, rank=config.cross_rank)
        *hidden, last = config.top_mlp
        self.top = make_mlp((config.top_input, *hidden))
        self.logit = nn.Linear(hidden[-1], last)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1]."""
        x = self.bottom(dense)
        pooled = self.tables(indices, offsets)
        joined = torch.cat([x.unsqueeze(1), pooled], dim=1)
        return self.logit(self.top(self.cross(joined.view(joined.shape[0], -1))))

    def dense_parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: the tables are updated in the backward pass."""
        tables = {id(p) for p in self.tables.parameters()}
        return [p for p in self.parameters() if id(p) not in tables]
