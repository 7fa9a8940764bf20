"""ResNet-50 v1.5, ResNeXt-101 32x4d (perhaps with squeeze and excitation) and EfficientNet-B0 of an example."""

from __future__ import annotations

import math

import torch
from torch import nn

_RESNETS = {  # blocks, widths, expansion, groups, whether it squeezes and excites
    "resnet50": ((3, 4, 6, 3), (64, 128, 256, 512), 4, 1, False),
    "resnext101-32x4d": ((3, 4, 23, 3), (128, 256, 512, 1024), 2, 32, False),
    "se-resnext101-32x4d": ((3, 4, 23, 3), (128, 256, 512, 1024), 2, 32, True),
}
# kernel, stride, repeats, expansion, channels of EfficientNet-B0's stages
_B0 = ((3, 1, 1, 1, 16), (3, 2, 2, 6, 24), (5, 2, 2, 6, 40), (3, 2, 3, 6, 80), (5, 1, 3, 6, 112), (5, 2, 4, 6, 192),
       (3, 1, 1, 6, 320))  # fmt: skip
# width, depth and pixels of the other EfficientNets, times B0's
_SCALES = {
    "b0": (1.0, 1.0, 224), "b1": (1.0, 1.1, 240), "b2": (1.1, 1.2, 260), "b3": (1.2, 1.4, 300), "b4": (1.4, 1.8, 380),
    "b5": (1.6, 2.2, 456), "b6": (1.8, 2.6, 528), "b7": (2.0, 3.1, 600),
}  # fmt: skip
_SQUEEZED = 16  # channels between squeeze and excitation of a ResNeXt


def make_convnet(name: str) -> nn.Module:
    """The model of this name: "resnet50", "resnext101-32x4d", "se-resnext101-32x4d", "efficientnet-b0" to "-b7" or
    "efficientnet-widese-b0" to "-b7"."""
    if name in _RESNETS:
        return ResNet(*_RESNETS[name])
    return EfficientNet(*_SCALES[name[-2:]][:2], wide="widese" in name)


def count_image_pixels(name: str) -> int:
    """Pixels along the side of the images that a model is trained with."""
    return 224 if name in _RESNETS else _SCALES[name[-2:]][2]


def list_convnets() -> tuple[str, ...]:
    """Names that `make_convnet` knows."""
    scaled = [f"efficientnet-{kind}{scale}" for kind in ("", "widese-") for scale in _SCALES]
    return (*_RESNETS, *scaled)


class Squeeze(nn.Module):
    """One weight a channel, from the mean over the image."""

    def __init__(self, channels: int, squeezed: int, activation: nn.Module) -> None:
        super().__init__()
        self.pooling = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weights [batch, channels, 1, 1]."""
        weights: torch.Tensor = self.sigmoid(self.expand(self.activation(self.squeeze(self.pooling(x)))))
        return weights


class Bottleneck(nn.Module):
    """1x1, 3x3 (in groups), 1x1 convolutions with batch norm, and a shortcut; stride in the 3x3."""

    def __init__(self, into: int, width: int, out: int, stride: int, groups: int, *, squeezes: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.squeeze = Squeeze(out, _SQUEEZED, nn.ReLU(inplace=True)) if squeezes else None
        self.downsample: nn.Module | None = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        if self.squeeze is None:
            out += shortcut
        else:
            out = torch.addcmul(shortcut, out, self.squeeze(out), value=1)
        activated: torch.Tensor = self.relu(out)
        return activated


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        activated: torch.Tensor = self.relu(out)
        return activated


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks (of basic blocks where they do not expand), classifier of 1000 classes."""

    def __init__(
        self, blocks: tuple[int, ...], widths: tuple[int, ...], expansion: int, groups: int, squeezes: bool
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        channels, stages = 64, []
        stage: list[nn.Module]
        for number, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            stage = []
            for block in range(count):
                stride = 2 if number and not block else 1
                out = width * max(expansion, 1)
                stage.append(
                    Bottleneck(channels, width, out, stride, groups, squeezes=squeezes)
                    if expansion
                    else BasicBlock(channels, out, stride)
                )
                channels = out
            stages.append(nn.Sequential(*stage))
        self.layers = nn.Sequential(*stages)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        x = self.avgpool(self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x))))))
        scores: torch.Tensor = self.fc(x.reshape(x.size(0), -1))
        return scores


def _make_convolution(
    into: int, out: int, kernel: int, stride: int = 1, groups: int = 1, *, active: bool = True
) -> nn.Module:
    padding = (kernel - 1) // 2
    conv = nn.Conv2d(into, out, kernel, stride=stride, padding=padding, groups=groups, bias=False)
    norm = nn.BatchNorm2d(out, eps=1e-3, momentum=0.01)
    return nn.Sequential(conv, norm, *([nn.SiLU(inplace=True)] if active else []))


class InvertedBottleneck(nn.Module):
    """1x1 to more channels, depthwise, squeeze and excitation, 1x1 to fewer, and a shortcut where sizes allow."""

    def __init__(self, into: int, out: int, kernel: int, stride: int, expansion: int, *, wide: bool) -> None:
        super().__init__()
        hidden = into * expansion
        self.expand = None if hidden == into else _make_convolution(into, hidden, 1)
        self.depthwise = _make_convolution(hidden, hidden, kernel, stride, groups=hidden)
        squeezed = max(1, (hidden if wide else into) // 4)
        self.squeeze = Squeeze(hidden, squeezed, nn.SiLU(inplace=True))
        self.project = _make_convolution(hidden, out, 1, active=False)
        self.residual = stride == 1 and into == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        grown = self.depthwise(x if self.expand is None else self.expand(x))
        out: torch.Tensor = self.project(self.squeeze(grown) * grown)
        return torch.add(x, out) if self.residual else out


def scale_channels(channels: int, width: float) -> int:
    """Channels times a width, a multiple of 8 that is at least nine tenths of it."""
    near = max(8, int(width * channels + 4) // 8 * 8)
    return near if near >= 0.9 * width * channels else near + 8


class EfficientNet(nn.Module):
    """EfficientNet with 1000 classes, B0 times a width and a depth; `wide` squeezes to a quarter of the grown
    channels."""

    def __init__(self, width: float = 1.0, depth: float = 1.0, *, wide: bool) -> None:
        super().__init__()
        channels, blocks = scale_channels(32, width), []
        self.stem = _make_convolution(3, channels, 3, 2)
        for kernel, stride, repeats, expansion, narrow in _B0:
            out = scale_channels(narrow, width)
            for repeat in range(math.ceil(depth * repeats)):
                first = stride if not repeat else 1
                blocks.append(InvertedBottleneck(channels, out, kernel, first, expansion, wide=wide))
                channels = out
        self.layers = nn.Sequential(*blocks)
        last = scale_channels(1280, width)
        self.features = _make_convolution(channels, last, 1)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(last, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, classes]."""
        scores: torch.Tensor = self.classifier(self.features(self.layers(self.stem(x))))
        return scores
