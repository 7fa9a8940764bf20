"""DLRM with the DCNv2 interaction of MLPerf v3.0 and later (low-rank cross network), as TorchRec builds it."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from traincast.models.define.dlrm import mlp
from traincast.models.define.embeddings import TABLES
from traincast.models.dlrm_config import RESIDENT_ROWS_CAP, DlrmConfig

DLRM_V2 = DlrmConfig(
    name="dlrm-v2",
    bottom_mlp=(13, 512, 256, 128),
    top_mlp=(1024, 1024, 512, 256, 1),
    rows_per_table=(
        40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
        2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
    ),
    embedding_dim=128,
    lookups_per_table=(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
    interaction="cat",
    optimizer="adagrad",
    embedding="fbgemm",
    batch_size=8192,
    index_dtype="int64",
    resident_rows=RESIDENT_ROWS_CAP,
)  # fmt: skip
CROSS_LAYERS = 3
LOW_RANK = 512


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

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.config = config
        self.bottom = mlp(config.bottom_mlp)
        self.tables = TABLES[config.embedding](_fused(config))
        self.cross = LowRankCross(config.top_input, layers=CROSS_LAYERS, rank=LOW_RANK)
        *hidden, last = config.top_mlp
        self.top = mlp((config.top_input, *hidden))
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


def _fused(config: DlrmConfig) -> DlrmConfig:
    """MLPerf's tables keep one Adagrad moment per row."""
    return replace(config, optimizer="rowwise_adagrad") if config.optimizer == "adagrad" else config
