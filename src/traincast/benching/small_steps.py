"""Small training steps, drawn: what their ops take inside a step, and what the host takes beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from traincast.embeddings.access import parse_access
from traincast.embeddings.draws import draw_rows

Step = Callable[[], object]
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.AdamW, "adagrad": torch.optim.Adagrad,
}  # fmt: skip
_FILL = 0.01  # of table entries; random ones would take longer to draw than to train on
_RATE = 1e-4  # keeps every number in the range of normal ones
_LAWS = ("uniform", "zipf:0.7", "zipf:0.9", "zipf:1.1")
_SIDE = 24  # of images


@dataclass(frozen=True, slots=True)
class SmallStep:
    """A step of `layers` linear layers of one width, `norms` layer norms with GELU, `views` reshapes, an embedding bag
    for each of `tables` (rows, lookups per sample, which rows), `convolutions` on images, and an optimizer."""

    name: str
    batch_size: int
    width: int
    layers: int
    norms: int
    views: int
    convolutions: int
    tables: tuple[tuple[int, int, str], ...]
    optimizer: str

    @property
    def access(self) -> tuple[str, ...]:
        """Which rows the lookups of each table want."""
        return tuple(law for _, _, law in self.tables)

    def make(self, batch_size: int) -> Step:
        """Model, optimizer and inputs; the callable runs one iteration."""
        model = _Model(self)
        data = torch.rand(batch_size, self.width)
        images = torch.rand(max(batch_size // 32, 1), 3, _SIDE, _SIDE)
        random = np.random.default_rng(0)
        indices = [
            torch.from_numpy(draw_rows(parse_access(law), rows, batch_size * lookups, random))
            for rows, lookups, law in self.tables
        ]
        offsets = [torch.arange(0, batch_size * lookups, lookups) for _, lookups, _ in self.tables]
        optimizer = _OPTIMIZERS[self.optimizer](model.parameters(), lr=_RATE, foreach=False)

        def step() -> None:
            optimizer.zero_grad()
            model(data, indices, offsets, images).mean().backward()
            optimizer.step()

        return step


class _Model(nn.Module):
    def __init__(self, of: SmallStep) -> None:
        super().__init__()
        width = of.width
        self.views = of.views
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=True, _weight=torch.full((rows, width), _FILL))
            for rows, _, _ in of.tables
        )
        self.joined = nn.Linear(width * (1 + len(of.tables)), width)
        self.linear = nn.ModuleList(nn.Linear(width, width) for _ in range(of.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(of.norms))
        channels = [3, *[max(width // 8, 8)] * of.convolutions]
        self.images = nn.ModuleList(
            nn.Conv2d(read, made, 3, padding=1) for read, made in zip(channels, channels[1:], strict=False)
        )

    def forward(
        self, x: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor], images: torch.Tensor
    ) -> torch.Tensor:
        pooled = [bag(*given) for bag, *given in zip(self.bags, indices, offsets, strict=True)]
        x = torch.relu(self.joined(torch.cat([x, *pooled], dim=1)))
        for layer in self.linear:
            x = torch.relu(layer(x))
        for norm in self.norms:
            x = x + torch.nn.functional.gelu(norm(x))
        for _ in range(self.views):
            x = x.view(-1).view(-1, self.joined.out_features)
        for convolution in self.images:
            images = torch.relu(convolution(images))
        return x if not self.images else x + images.mean()


def small_steps(seed: int = 0) -> Iterator[SmallStep]:
    """Steps without end, which differ in how often each event of the host occurs and in how far data is moved between
    two uses of it."""
    random = np.random.default_rng((seed, 7))
    number = 0
    while True:
        optimizer = str(random.choice(["sgd", "sgd", "sgd", "sgd", "adam", "adagrad"]))
        tables = int(random.integers(2, 14)) if optimizer == "sgd" and random.random() < 0.8 else 0
        yield SmallStep(
            name=f"small-step-{seed}-{number}", batch_size=int(random.choice([32, 64, 128, 256, 512])),
            width=int(random.choice([16, 32, 64, 128, 256])), layers=int(random.integers(1, 8)),
            norms=int(random.integers(0, 5)), views=int(random.integers(0, 10)),
            convolutions=int(random.integers(1, 4)) if not tables and random.random() < 0.5 else 0,
            tables=tuple(_table(random) for _ in range(tables)), optimizer=optimizer,
        )  # fmt: skip
        number += 1


def _table(random: np.random.Generator) -> tuple[int, int, str]:
    rows, lookups = (round(float(2.0 ** random.uniform(*np.log2(limits)))) for limits in ((1e3, 3e5), (1, 32)))
    return rows, lookups, str(random.choice(_LAWS))
