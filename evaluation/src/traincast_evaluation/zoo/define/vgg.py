"""VGG as torchvision defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

STAGES = (64, 128, 256, 512, 512)


class Vgg(nn.Module):
    """Five stages of 3x3 convolutions (perhaps with batch norm) and a pool, then three linear layers."""

    def __init__(self, convolutions: Sequence[int], *, normed: bool, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in zip(STAGES, convolutions, strict=True):
            for _ in range(count):
                norm = [nn.BatchNorm2d(width)] if normed else []
                layers += [nn.Conv2d(channels, width, 3, padding=1), *norm, nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2, stride=2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(True), nn.Dropout(),
            nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(),
            nn.Linear(4096, num_classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class Vgg13(Vgg):
    """Two convolutions a stage, without batch norm."""

    def __init__(self) -> None:
        super().__init__((2, 2, 2, 2, 2), normed=False)
