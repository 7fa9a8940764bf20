"""DLRM as facebookresearch/dlrm trains it: inputs copied inside the step, dot interaction, sigmoid, MSE or BCE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from traincast.models.dlrm.config import DlrmConfig
from traincast_evaluation.zoo.define.embeddings import TABLES
from traincast_evaluation.zoo.define.views import slice_leading


def make_mlp(widths: Sequence[int], *, sigmoid_last: bool = False) -> nn.Sequential:
    """Linear and ReLU for every pair of widths; the last activation may be a sigmoid."""
    layers: list[nn.Module] = []
    pairs = list(zip(widths, widths[1:], strict=False))
    for i, (fan_in, fan_out) in enumerate(pairs):
        layers.append(nn.Linear(fan_in, fan_out))
        layers.append(nn.Sigmoid() if sigmoid_last and i == len(pairs) - 1 else nn.ReLU())
    return nn.Sequential(*layers)


class DotInteraction(nn.Module):
    """Pairwise dot products of the dense vector and the embeddings, strict lower triangle, after the dense vector."""

    def forward(self, dense: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`features` is [batch, tables + 1, dim], the dense vector among them."""
        products = torch.bmm(features, torch.transpose(features, 1, 2))
        size = products.shape[1]
        # built on the host every step, as the original does: the gather, and its backward, copy them over and wait
        row = torch.tensor([i for i in range(size) for _ in range(i)])
        column = torch.tensor([j for i in range(size) for j in range(i)])
        # PyTorch 1.8 takes the full slice of `GEMMs[:, row, column]` as an op of its own
        whole = slice_leading(products, 0, products.shape[0])
        return torch.cat([dense, whole[:, row, column]], dim=1)


class Dlrm(nn.Module):
    """Bottom MLP, tables, interaction, top MLP."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.config = config
        self.bottom = make_mlp(config.bottom_mlp)
        self.tables = TABLES[config.embedding](config)
        self.interaction = DotInteraction()
        self.top = make_mlp((config.top_input, *config.top_mlp), sigmoid_last=True)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Click probabilities [batch, 1]."""
        x = self.bottom(dense)
        pooled = self.tables(indices, offsets)
        return self.top(self._interact(x, pooled))

    def _interact(self, x: torch.Tensor, pooled: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        batch, dim = x.shape
        dot = self.config.interaction == "dot"
        if isinstance(pooled, list):
            joined = torch.cat([x, *pooled], dim=1)
            return self.interaction(x, joined.view(batch, -1, dim)) if dot else joined
        if dot:
            return self.interaction(x, torch.cat([x.view(batch, 1, dim), pooled], dim=1))
        return torch.cat([x, pooled.view(batch, -1)], dim=1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps: fused embeddings update their tables in the backward pass."""
        if self.config.embedding == "bag":
            return list(self.parameters())
        return [*self.bottom.parameters(), *self.top.parameters()]
