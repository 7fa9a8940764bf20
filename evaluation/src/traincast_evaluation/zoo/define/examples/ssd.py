"""SSD300 of its example: ResNet-50 up to its third stage at stride 8, six maps of boxes, hard negative mining."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.examples.convnets import Bottleneck, ResNet, make_convnet

CLASSES, BOXES = 81, 8732
_CHANNELS = (1024, 512, 512, 256, 256, 256)
_BETWEEN = (256, 256, 128, 128, 128)
_PER_PLACE = (4, 6, 6, 6, 4, 4)
_STRIDED = 3  # of the blocks after the backbone, those that halve their map


def _make_block(into: int, between: int, out: int, *, halves: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(into, between, 1, bias=False), nn.BatchNorm2d(between), nn.ReLU(inplace=True),
        nn.Conv2d(between, out, 3, padding=int(halves), stride=1 + halves, bias=False), nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )  # fmt: skip


class Ssd300(nn.Module):
    """Offsets and class scores of 8,732 default boxes."""

    def __init__(self) -> None:
        super().__init__()
        whole = make_convnet("resnet50")
        assert isinstance(whole, ResNet)
        stages = list(whole.layers.children())[:3]
        first = next(stages[2].children())
        assert isinstance(first, Bottleneck)
        for convolution in (first.conv2, *list(first.downsample.children())[:1]):  # type: ignore[union-attr]
            assert isinstance(convolution, nn.Conv2d)
            convolution.stride = (1, 1)
        self.features = nn.Sequential(whole.conv1, whole.bn1, whole.relu, whole.maxpool, *stages)
        self.blocks = nn.ModuleList(
            _make_block(into, between, out, halves=number < _STRIDED)
            for number, (into, between, out) in enumerate(zip(_CHANNELS[:-1], _BETWEEN, _CHANNELS[1:], strict=True))
        )
        heads = list(zip(_CHANNELS, _PER_PLACE, strict=True))
        self.places = nn.ModuleList(nn.Conv2d(into, 4 * boxes, 3, padding=1) for into, boxes in heads)
        self.scores = nn.ModuleList(nn.Conv2d(into, CLASSES * boxes, 3, padding=1) for into, boxes in heads)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets [batch, 4, boxes] and scores [batch, classes, boxes]."""
        maps = [self.features(images)]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        batch = images.size(0)
        places = [head(x).reshape(batch, 4, -1) for head, x in zip(self.places, maps, strict=True)]
        scores = [head(x).reshape(batch, CLASSES, -1) for head, x in zip(self.scores, maps, strict=True)]
        return torch.cat(places, 2).contiguous(), torch.cat(scores, 2).contiguous()


def compute_ssd_loss(
    places: torch.Tensor, scores: torch.Tensor, true_places: torch.Tensor, labels: torch.Tensor, boxes: torch.Tensor
) -> torch.Tensor:
    """Location loss of boxes with an object, and cross entropy of those and of three times as many of the worst."""
    mask = labels > 0
    found = mask.sum(dim=1)
    centre = 10.0 * (true_places[:, :2, :] - boxes[:, :2, :]) / boxes[:, 2:, :]
    extent = 5.0 * (true_places[:, 2:, :] / boxes[:, 2:, :]).log()
    wanted = torch.cat((centre, extent), dim=1).contiguous()
    location = (mask.float() * F.smooth_l1_loss(places, wanted, reduction="none").sum(dim=1)).sum(dim=1)
    entropy = F.cross_entropy(scores, labels, reduction="none")
    negative = entropy.clone().masked_fill(mask, 0.0)
    _, order = negative.sort(dim=1, descending=True)
    _, rank = order.sort(dim=1)
    chosen = rank < torch.clamp(3 * found, max=mask.size(1)).unsqueeze(-1)
    classes = (entropy * (mask.float() + chosen.float())).sum(dim=1)
    share = (found > 0).float() / found.float().clamp(min=1e-6)
    return ((location + classes) * share).mean(dim=0)
