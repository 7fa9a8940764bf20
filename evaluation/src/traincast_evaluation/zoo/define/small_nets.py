"""Convolution nets of torchvision for few multiplications: DenseNet, MobileNetV2, MNASNet, ShuffleNetV2, SqueezeNet."""

from __future__ import annotations

import torch
from torch import nn

from traincast_evaluation.zoo.define.examples.convnets import scale_channels

# expansion, channels, repeats, stride, kernel
_MOBILE_STAGES = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3),
                  (6, 160, 3, 2, 3), (6, 320, 1, 1, 3))  # fmt: skip
_MNAS_STAGES = ((1, 16, 1, 1, 3), (3, 24, 3, 2, 3), (3, 40, 3, 2, 5), (6, 80, 3, 2, 5), (6, 96, 2, 1, 3),
                (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))  # fmt: skip
_SHUFFLE_REPEATS = (4, 8, 4)
# squeezed and expanded channels of SqueezeNet's blocks, None: a pool
_FIRE_1_0 = ((16, 64), (16, 64), (32, 128), None, (32, 128), (48, 192), (48, 192), (64, 256), None, (64, 256))
_FIRE_1_1 = ((16, 64), (16, 64), None, (32, 128), (32, 128), None, (48, 192), (48, 192), (64, 256), (64, 256))


def _make_layer(
    into: int, out: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Module:
    conv = nn.Conv2d(into, out, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), *([act] if act else []))


class _DenseLayer(nn.Module):
    """Norm, 1x1, norm, 3x3 over everything that earlier layers of the block made."""

    def __init__(self, into: int, growth: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.BatchNorm2d(into), nn.ReLU(inplace=True), nn.Conv2d(into, 4 * growth, 1, bias=False)
        )
        self.second = nn.Sequential(
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )

    def forward(self, made: list[torch.Tensor]) -> torch.Tensor:
        """New channels."""
        new: torch.Tensor = self.second(self.first(torch.cat(made, 1)))
        return new


class DenseNet(nn.Module):
    """Blocks of layers that each read all before them, halved in between."""

    def __init__(self, blocks: tuple[int, ...], growth: int, stem: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(stem), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        channels = stem
        for number, layers in enumerate(blocks):
            self.blocks.append(nn.ModuleList(_DenseLayer(channels + i * growth, growth) for i in range(layers)))
            channels += layers * growth
            if number < len(blocks) - 1:
                halved = nn.Conv2d(channels, channels // 2, 1, bias=False)
                self.transitions.append(
                    nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), halved, nn.AvgPool2d(2, stride=2))
                )
                channels //= 2
        self.norm, self.fc = nn.BatchNorm2d(channels), nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            made = [x]
            for layer in block:  # type: ignore[attr-defined]
                made.append(layer(made))
            x = torch.cat(made, 1)
            x = self.transitions[number](x) if number < len(self.transitions) else x
        x = torch.relu_(self.norm(x))
        scores: torch.Tensor = self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, (1, 1)), 1))
        return scores


class _InvertedResidual(nn.Module):
    """1x1 to more channels, depthwise, 1x1 to fewer, and a shortcut where sizes allow."""

    def __init__(self, into: int, out: int, stride: int, expansion: int, kernel: int, act: type[nn.Module]) -> None:
        super().__init__()
        wide = into * expansion
        grown = [_make_layer(into, wide, 1, act=act(inplace=True))] if expansion > 1 else []
        self.layers = nn.Sequential(
            *grown, _make_layer(wide, wide, kernel, stride, wide, act(inplace=True)), _make_layer(wide, out, 1)
        )
        self.residual = stride == 1 and into == out and expansion > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        out: torch.Tensor = self.layers(x)
        return x + out if self.residual else out


class MobileNet(nn.Module):
    """MobileNetV2, or MNASNet of a width."""

    def __init__(self, *, width: float | None = None) -> None:
        super().__init__()
        act, stages = (nn.ReLU6, _MOBILE_STAGES) if width is None else (nn.ReLU, _MNAS_STAGES)
        channels = scale_channels(32, width or 1.0)
        layers = [_make_layer(3, channels, 3, 2, act=act(inplace=True))]
        for expansion, narrow, repeats, stride, kernel in stages:
            out = scale_channels(narrow, width or 1.0)
            for repeat in range(repeats):
                layers.append(_InvertedResidual(channels, out, 1 if repeat else stride, expansion, kernel, act))
                channels = out
        self.layers = nn.Sequential(*layers, _make_layer(channels, 1280, 1, act=act(inplace=True)))
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=width is not None), nn.Linear(1280, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        scores: torch.Tensor = self.classifier(self.layers(x).mean([2, 3]))
        return scores


class _ShuffleBlock(nn.Module):
    """Half of the channels pass; the others go through 1x1, depthwise, 1x1; then the halves are mixed."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        half = out // 2
        self.short: nn.Module | None = None
        if stride > 1:
            joined = _make_layer(into, half, 1, act=nn.ReLU(inplace=True))
            self.short = nn.Sequential(_make_layer(into, into, 3, stride, into), joined)
        self.long = nn.Sequential(
            _make_layer(into if stride > 1 else half, half, 1, act=nn.ReLU(inplace=True)),
            _make_layer(half, half, 3, stride, half), _make_layer(half, half, 1, act=nn.ReLU(inplace=True)),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        first, second = (self.short(x), x) if self.short is not None else x.chunk(2, dim=1)
        out = torch.cat((first, self.long(second)), dim=1)
        batch, channels, height, width = out.shape
        mixed = out.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return mixed.view(batch, -1, height, width)


class ShuffleNet(nn.Module):
    """ShuffleNetV2 whose three stages make these channels, and the last layer the fourth number."""

    def __init__(self, channels: tuple[int, int, int, int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [_make_layer(3, 24, 3, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1)]
        into = 24
        for repeats, out in zip(_SHUFFLE_REPEATS, channels[:3], strict=True):
            layers += [_ShuffleBlock(into if not i else out, out, 1 if i else 2) for i in range(repeats)]
            into = out
        self.layers = nn.Sequential(*layers, _make_layer(into, channels[3], 1, act=nn.ReLU(inplace=True)))
        self.fc = nn.Linear(channels[3], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        scores: torch.Tensor = self.fc(self.layers(x).mean([2, 3]))
        return scores


class _Fire(nn.Module):
    """1x1 to few channels, then 1x1 and 3x3 side by side."""

    def __init__(self, into: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze, self.relu = nn.Conv2d(into, squeezed, 1), nn.ReLU(inplace=True)
        self.small, self.large = nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        x = self.relu(self.squeeze(x))
        return torch.cat([self.relu(self.small(x)), torch.relu_(self.large(x))], 1)


class SqueezeNet(nn.Module):
    """SqueezeNet 1.0 or 1.1."""

    def __init__(self, *, newer: bool) -> None:
        super().__init__()
        channels, kernel = (64, 3) if newer else (96, 7)
        layers = [nn.Conv2d(3, channels, kernel, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True)]
        for fire in _FIRE_1_1 if newer else _FIRE_1_0:
            layers.append(_Fire(channels, *fire) if fire else nn.MaxPool2d(3, 2, ceil_mode=True))
            channels = 2 * fire[1] if fire else channels
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Conv2d(512, 1000, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        return torch.flatten(self.classifier(self.layers(x)), 1)
