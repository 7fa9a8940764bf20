"""Small models written the way a user would, on any device: captured as `cuda`, run for real on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], object]


class DLRM(nn.Module):
    def __init__(self, tables: int, rows: int, dim: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        features = tables + 1
        self.top = nn.Sequential(
            nn.Linear(dim + features * (features - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid()
        )
        lower = torch.tril_indices(features, features, -1)
        self.register_buffer("rows", lower[0])
        self.register_buffer("columns", lower[1])

    def forward(self, dense: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        dense = self.bottom(dense)
        looked_up = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
        stacked = torch.cat([dense, *looked_up], dim=1).view(len(dense), -1, dense.shape[1])
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([dense, pairs], dim=1)).squeeze(1)


def dlrm(
    batch: int, device: str, *, tables: int = 4, rows: int = 1000, dim: int = 16, lookups: int = 3,
    sparse: bool = False, copies: bool = False,
) -> Step:  # fmt: skip
    model = DLRM(tables, rows, dim, sparse=sparse).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    dense = torch.randn(batch, 13, device="cpu" if copies else device)
    target = torch.rand(batch, device=device)
    indices = [torch.randint(0, rows, (batch * lookups,), device=device) for _ in range(tables)]
    offsets = [torch.arange(0, batch * lookups, lookups, device=device) for _ in range(tables)]

    def step() -> None:
        optimizer.zero_grad()
        F.binary_cross_entropy(model(dense.to(device), indices, offsets), target).backward()
        optimizer.step()

    return step


def mlp(batch: int, device: str, *, optimizer: str = "SGD", **options: object) -> Step:
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 7)).to(device)
    options.setdefault("foreach", True)
    optim = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    inputs, target = torch.randn(batch, 20, device=device), torch.randint(0, 7, (batch,), device=device)

    def step() -> None:
        optim.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optim.step()

    return step


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv2(torch.relu(self.norm(self.conv1(x)))) + x)


def cnn(batch: int, device: str) -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2), Residual(8), Residual(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    images, labels = torch.randn(batch, 3, 32, 32, device=device), torch.randint(0, 10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(images), labels).backward()
        optimizer.step()

    return step


def encoder(batch: int, length: int, device: str, *, dropout: float = 0.0) -> Step:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
    model = nn.Sequential(nn.Embedding(100, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 100)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.randint(0, 100, (batch, length), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).view(-1, 100), tokens.view(-1)).backward()
        optimizer.step()

    return step
