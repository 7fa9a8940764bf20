"""Inception-v3 as torchvision defines it, auxiliary classifier included."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Conv(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int | tuple[int, int], *,
                 stride: int = 1, padding: int | tuple[int, int] = 0) -> None:  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(channels_out, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Chain(nn.Sequential):
    """Convolutions one after the other."""


class Pooled(nn.Module):
    """A 3x3 average pool that keeps the size, then a 1x1 convolution."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = Conv(channels_in, channels_out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        return self.conv(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))


class Forked(nn.Module):
    """A chain whose end forks into a 1x3 and a 3x1 convolution, concatenated."""

    def __init__(self, chain: nn.Module, channels: int) -> None:
        super().__init__()
        self.chain = chain
        self.wide = Conv(channels, 384, (1, 3), padding=(0, 1))
        self.tall = Conv(channels, 384, (3, 1), padding=(1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        x = self.chain(x)
        return torch.cat([self.wide(x), self.tall(x)], 1)


class Mixed(nn.Module):
    """Branches run one after the other on the same input and concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _make_mixed_a(channels: int, pool: int) -> Mixed:
    return Mixed(
        Conv(channels, 64, 1),
        Chain(Conv(channels, 48, 1), Conv(48, 64, 5, padding=2)),
        Chain(Conv(channels, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, padding=1)),
        Pooled(channels, pool),
    )


def _make_mixed_b(channels: int) -> Mixed:
    return Mixed(
        Conv(channels, 384, 3, stride=2),
        Chain(Conv(channels, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def _make_mixed_c(channels: int, width: int) -> Mixed:
    wide, tall = {"kernel": (1, 7), "padding": (0, 3)}, {"kernel": (7, 1), "padding": (3, 0)}

    def conv(channels_in: int, channels_out: int, shape: dict[str, tuple[int, int]]) -> Conv:
        return Conv(channels_in, channels_out, shape["kernel"], padding=shape["padding"])

    return Mixed(
        Conv(channels, 192, 1),
        Chain(Conv(channels, width, 1), conv(width, width, wide), conv(width, 192, tall)),
        Chain(Conv(channels, width, 1), conv(width, width, tall), conv(width, width, wide),
              conv(width, width, tall), conv(width, 192, wide)),
        Pooled(channels, 192),
    )  # fmt: skip


def _make_mixed_d(channels: int) -> Mixed:
    return Mixed(
        Chain(Conv(channels, 192, 1), Conv(192, 320, 3, stride=2)),
        Chain(Conv(channels, 192, 1), Conv(192, 192, (1, 7), padding=(0, 3)),
              Conv(192, 192, (7, 1), padding=(3, 0)), Conv(192, 192, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )  # fmt: skip


def _make_mixed_e(channels: int) -> Mixed:
    return Mixed(
        Conv(channels, 320, 1),
        Forked(Conv(channels, 384, 1), 384),
        Forked(Chain(Conv(channels, 448, 1), Conv(448, 384, 3, padding=1)), 384),
        Pooled(channels, 192),
    )


class Auxiliary(nn.Module):
    """The classifier on the middle of the network. The study trains with it run forwards and its result unused: its
    overhead table counts 96 convolutions per step and 94 of their backwards."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv0 = Conv(channels, 128, 1)
        self.conv1 = Conv(128, 768, 5)
        self.fc = nn.Linear(768, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        x = self.conv1(self.conv0(F.avg_pool2d(x, kernel_size=5, stride=3)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class InceptionV3(nn.Module):
    """Inception-v3 for 299 x 299 images."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = Chain(
            Conv(3, 32, 3, stride=2), Conv(32, 32, 3), Conv(32, 64, 3, padding=1), nn.MaxPool2d(3, stride=2),
            Conv(64, 80, 1), Conv(80, 192, 3), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        self.middle = Chain(
            _make_mixed_a(192, 32), _make_mixed_a(256, 64), _make_mixed_a(288, 64), _make_mixed_b(288),
            _make_mixed_c(768, 128), _make_mixed_c(768, 160), _make_mixed_c(768, 160), _make_mixed_c(768, 192),
        )  # fmt: skip
        self.auxiliary = Auxiliary(768, num_classes)
        self.end = Chain(_make_mixed_d(768), _make_mixed_e(1280), _make_mixed_e(2048))
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(2048, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        x = self.middle(self.stem(x))
        if self.training:
            self.auxiliary(x)
        x = self.end(x)
        return self.fc(torch.flatten(self.dropout(self.pool(x)), 1))
