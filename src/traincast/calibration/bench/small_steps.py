"""Small training steps, drawn: what their ops take inside a step, and what the host takes alongside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from traincast.calibration.bench.all_to_all import DifferentiableAllToAll
from traincast.models.embeddings.access import parse_access
from traincast.models.embeddings.draws import draw_rows

Step = Callable[[], object]
_FILL = 0.01  # of table entries; random ones would take longer to draw than to train on
_RATE = 1e-4  # keeps every number in the range of normal ones
_DRAW = 2  # of steps, in their names: a store of another draw gets these alongside its own
_LAWS = ("uniform", "zipf:0.7", "zipf:0.9", "zipf:1.1")
_SIDE = 24  # of images
_MOST_WORK = 1 << 28  # samples times the weights of linear layers: 30 ms of a core
_SEQUENCE = 16  # samples that attend to each other
_TABLE_BYTES = 384e6  # of all tables of a step
_LOSSES = ("mean", "classes", "clicks")


@dataclass(frozen=True, slots=True)
class SmallStep:
    """A step of `layers` linear layers of `hidden` columns, `norms` layer norms with GELU, `views` reshapes, an
    embedding bag of `width` columns for each of `tables` (rows, lookups per sample, which rows), `convolutions` on
    images (with batch norms and pools where they are `pooled`), `attention` layers over sequences of 16 samples, an
    embedding of this many `words` that is added to them, a loss (the mean, cross entropy over the last columns, or
    binary cross entropy of one output), and an optimizer."""

    name: str
    batch_size: int
    width: int
    hidden: int
    layers: int
    norms: int
    views: int
    convolutions: int
    pooled: bool
    attention: int
    words: int
    loss: str
    tables: tuple[tuple[int, int, str], ...]
    optimizer: str

    @property
    def access(self) -> tuple[str, ...]:
        """Which rows the lookups of each table want."""
        return tuple(distribution for _, _, distribution in self.tables)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> SmallStep:
        """A step from its fields, which may have been JSON."""
        return SmallStep(**{**fields, "tables": tuple(tuple(table) for table in fields["tables"])})

    def make(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Step:
        """Model, optimizer and inputs; the callable runs one iteration. Of several ranks each has tables of its own,
        whose sums are exchanged, and all else under DDP."""
        model = _Model(self, several=world_size > 1)
        data = torch.rand(batch_size, self.width)
        images = torch.rand(max(batch_size // 32, 1), 3, _SIDE, _SIDE)
        random = np.random.default_rng(0)
        indices = [
            torch.from_numpy(draw_rows(parse_access(distribution), rows, batch_size * lookups, random))
            for rows, lookups, distribution in self.tables
        ]
        offsets = [torch.arange(0, batch_size * lookups, lookups) for _, lookups, _ in self.tables]
        optimizer = _make_optimizer(self.optimizer, model.parameters())
        measure = _make_criterion(self.loss, batch_size, self.hidden)

        def step() -> None:
            optimizer.zero_grad()
            measure(model(data, indices, offsets, images)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step


def _make_optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """As after some training: squares of gradients have been added up for every weight. Units that a few samples leave
    dead would have none, and the root of a zero among other numbers takes up to four times as long."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=_RATE, foreach=False)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=_RATE, foreach=False, initial_accumulator_value=1.0)
    adam = torch.optim.AdamW(parameters, lr=_RATE, foreach=False)
    for weight in adam.param_groups[0]["params"]:
        moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.ones_like(weight)}
        adam.state[weight] = {"step": torch.tensor(0.0), **moments}
    return adam


def _make_criterion(loss: str, samples: int, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss of what the model gives, with targets that it keeps."""
    if loss == "classes":
        classes = torch.arange(samples) % columns
        return lambda made: torch.nn.functional.cross_entropy(made, classes)
    if loss == "clicks":
        clicks = (torch.arange(samples) % 2).float().view(-1, 1)
        return lambda made: torch.nn.functional.binary_cross_entropy(torch.sigmoid(made), clicks)
    return torch.Tensor.mean


class _Model(nn.Module):
    def __init__(self, of: SmallStep, *, several: bool) -> None:
        super().__init__()
        self.several = several
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, of.width, mode="sum", sparse=True, _weight=torch.full((rows, of.width), _FILL))
            for rows, _, _ in of.tables
        )
        dense = _Dense(of)
        self.dense: nn.Module = DistributedDataParallel(dense) if several else dense

    def forward(
        self, x: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor], images: torch.Tensor
    ) -> torch.Tensor:
        pooled = [bag(*given) for bag, *given in zip(self.bags, indices, offsets, strict=True)]
        if pooled and self.several:
            sums = torch.cat(pooled, dim=1)
            parts = [sums.numel() // dist.get_world_size()] * dist.get_world_size()
            arrived = DifferentiableAllToAll.apply(sums.view(-1), parts, parts)  # type: ignore[no-untyped-call]
            pooled = [arrived.view(sums.shape)]
        made: torch.Tensor = self.dense(torch.cat([x, *pooled], dim=1), images)
        return made


class _Dense(nn.Module):
    def __init__(self, of: SmallStep) -> None:
        super().__init__()
        width = of.hidden
        self.views = of.views
        self.joined = nn.Linear(of.width * (1 + len(of.tables)), width)
        self.linear = nn.ModuleList(nn.Linear(width, width) for _ in range(of.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(of.norms))
        channels = [3, *[max(width // 8, 8)] * of.convolutions]
        self.images = nn.ModuleList(
            _make_image_layer(read, made, pooled=of.pooled) for read, made in zip(channels, channels[1:], strict=False)
        )
        self.attention = nn.ModuleList(_Attention(width) for _ in range(of.attention))
        self.words = nn.Embedding(of.words, width) if of.words else None
        self.last = nn.Linear(width, 1) if of.loss == "clicks" else None

    def forward(self, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.joined(x))
        for layer in self.linear:
            x = torch.relu(layer(x))
        for norm in self.norms:
            x = x + torch.nn.functional.gelu(norm(x))
        for _ in range(self.views):
            x = x.view(-1).view(-1, self.joined.out_features)
        if self.words is not None:
            x = x + self.words(torch.arange(len(x)) % self.words.num_embeddings)
        for attention in self.attention:
            x = attention(x)
        for layer in self.images:
            images = torch.relu(layer(images))
        x = x if not self.images else x + images.mean()
        return x if self.last is None else self.last(x)


def _make_image_layer(read: int, made: int, *, pooled: bool) -> nn.Module:
    if not pooled:
        return nn.Conv2d(read, made, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(read, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.MaxPool2d(2, stride=1)
    )


class _Attention(nn.Module):
    """Plain attention, product by product, as small models on a CPU have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 16, 1)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, width = x.shape
        parts = self.taken(x).view(-1, _SEQUENCE, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        scores = torch.softmax(query @ key.transpose(-1, -2) * 0.25, dim=-1)
        seen: torch.Tensor = self.given((scores @ value).transpose(1, 2).reshape(samples, width))
        return x + seen


def draw_small_steps(seed: int = 0) -> Iterator[SmallStep]:
    """Steps without end, which differ in how often each event of the host occurs and in how far data is moved between
    two uses of it."""
    random = np.random.default_rng((seed, 7, _DRAW))
    number = 0
    while True:
        optimizer = str(random.choice(["sgd", "sgd", "sgd", "sgd", "adam", "adam", "adagrad"]))
        tables = int(random.integers(2, 14)) if optimizer == "sgd" and random.random() < 0.8 else 0
        batch_size = int(random.choice([32, 64, 128, 256, 512, 1024]))
        hidden = int(random.choice([16, 32, 64, 128, 256, 512, 1024]))
        width = int(random.choice([16, 32, 64, 128, 256]))
        while batch_size * hidden**2 > _MOST_WORK:
            hidden //= 2
        layers = min(int(random.integers(1, 8)), max(1, _MOST_WORK // (batch_size * hidden**2)))
        attention = int(random.integers(1, 4)) if not tables and 8 * batch_size * hidden**2 <= _MOST_WORK else 0
        yield SmallStep(
            name=f"small-step-{_DRAW}-{seed}-{number}", batch_size=batch_size, width=width, hidden=hidden,
            layers=layers, norms=int(random.integers(0, 5)), views=int(random.integers(0, 10)),
            convolutions=int(random.integers(1, 4)) if not tables and random.random() < 0.5 else 0,
            pooled=bool(random.random() < 0.5), attention=attention,
            words=_draw_number(random, 500, 10_000) if attention else 0, loss=str(random.choice(_LOSSES)),
            tables=_draw_tables(random, tables, width), optimizer=optimizer,
        )  # fmt: skip
        number += 1


def _draw_tables(random: np.random.Generator, count: int, width: int) -> tuple[tuple[int, int, str], ...]:
    """This many of (rows, lookups per sample, which rows), all together no larger than tables of a step may be."""
    most = _TABLE_BYTES / (4 * width)
    drawn = [
        (_draw_number(random, 1e3, 1e6), _draw_number(random, 1, 40), str(random.choice(_LAWS))) for _ in range(count)
    ]
    share = min(1.0, most / max(sum(rows for rows, _, _ in drawn), 1))
    return tuple((max(int(rows * share), 1), lookups, distribution) for rows, lookups, distribution in drawn)


def _draw_number(random: np.random.Generator, low: float, high: float) -> int:
    """A number between two, even in its logarithm."""
    return round(float(2.0 ** random.uniform(*np.log2((low, high)))))
