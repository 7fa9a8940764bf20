"""Neural collaborative filtering of its example: products of embeddings beside an MLP over others (MovieLens 20M)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

USERS, ITEMS, FACTORS, WIDTHS, DROPOUT = 138493, 26744, 64, (256, 256, 128, 64), 0.5


class NeuMf(nn.Module):
    """Scores of (user, item) pairs."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTHS[0] // 2
        self.users, self.items = nn.Embedding(USERS, FACTORS), nn.Embedding(ITEMS, FACTORS)
        self.mlp_users, self.mlp_items = nn.Embedding(USERS, half), nn.Embedding(ITEMS, half)
        self.mlp = nn.ModuleList(nn.Linear(into, out) for into, out in zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
        self.final = nn.Linear(WIDTHS[-1] + FACTORS, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Scores [batch, 1]."""
        factors = self.users(user) * self.items(item)
        x = torch.cat((self.mlp_users(user), self.mlp_items(item)), dim=1)
        for layer in self.mlp:
            x = F.dropout(F.relu(layer(x)), p=DROPOUT, training=True)
        scores: torch.Tensor = self.final(torch.cat((factors, x), dim=1))
        return scores
