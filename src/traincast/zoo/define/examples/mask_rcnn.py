"""Mask R-CNN with a ResNet-50 and a feature pyramid, of its example; how many boxes there are is assumed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from traincast.zoo.define.examples.detection_ops import nms, roi_align

HEIGHT, WIDTH = 800, 1216  # assumed: the shorter side is 800, and a batch is padded to its widest image
BEFORE, AFTER = 2000, 1000  # boxes of a level and image before suppression, and those assumed to stay
PROPOSALS, ROIS, TARGETS = 4000, 512, 8  # best boxes of a whole batch, most of an image; objects assumed of an image
POSITIVE = 0.25  # share of the boxes that is assumed to hit an object
CHANNELS, CLASSES, ANCHORS = 256, 81, 3
_LEVEL_SHARES = (0.62, 0.22, 0.11, 0.05)  # assumed: which level a box is pooled from


class FrozenNorm(nn.Module):
    """Batch norm whose numbers are constants: a product and a sum."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.register_buffer(name, torch.ones(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        return x * self.weight.to(x.dtype) + self.bias.to(x.dtype)


class Bottleneck(nn.Module):
    """1x1 (with the stride), 3x3, 1x1 convolutions and a shortcut."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, width, 1, stride=stride, bias=False), FrozenNorm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), FrozenNorm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), FrozenNorm(4 * width)
        self.downsample: nn.Module | None = None
        if into != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(into, 4 * width, 1, stride=stride, bias=False), FrozenNorm(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        out = F.relu_(self.bn1(self.conv1(x)))
        out = F.relu_(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return F.relu_(out)


class Pyramid(nn.Module):
    """ResNet-50, its first two stages frozen, and five levels of features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), FrozenNorm(64)
        self.stages, channels = nn.ModuleList(), 64
        for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
            stage = []
            for block in range(blocks):
                stage.append(Bottleneck(channels, width, stride if not block else 1))
                channels = 4 * width
            self.stages.append(nn.Sequential(*stage))
        for frozen in (self.conv1, self.stages[0]):
            frozen.requires_grad_(False)
        self.inner = nn.ModuleList(nn.Conv2d(4 * w, CHANNELS, 1) for w in (64, 128, 256, 512))
        self.outer = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Features of five levels, the finest first."""
        x = F.max_pool2d(F.relu_(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        last = self.inner[3](found[3])
        levels = [self.outer[3](last)]
        for number in (2, 1, 0):
            last = self.inner[number](found[number]) + F.interpolate(last, scale_factor=2, mode="nearest")
            levels.insert(0, self.outer[number](last))
        return [*levels, F.max_pool2d(levels[-1], 1, 2)]


class Proposals(nn.Module):
    """Scores and offsets of anchors, and the boxes that are chosen from them, image by image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.scores, self.offsets = nn.Conv2d(CHANNELS, ANCHORS, 1), nn.Conv2d(CHANNELS, 4 * ANCHORS, 1)

    def forward(self, levels: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [batch, anchors] and offsets [batch, anchors, 4] of all levels; boxes are chosen on the way."""
        batch, scores, offsets = levels[0].size(0), [], []
        for level in levels:
            hidden = F.relu(self.conv(level))
            score = self.scores(hidden).permute(0, 2, 3, 1).reshape(batch, -1)
            offset = self.offsets(hidden).permute(0, 2, 3, 1).reshape(batch, -1, 4)
            scores.append(score)
            offsets.append(offset)
            with torch.no_grad():
                _choose(score.float().sigmoid(), offset.float())
        return torch.cat(scores, 1), torch.cat(offsets, 1)


def _choose(scores: torch.Tensor, offsets: torch.Tensor) -> None:
    """The best boxes of one level: decoded, clipped, and suppressed image by image, which the host waits for."""
    count = min(BEFORE, scores.size(1))
    best, order = scores.topk(count, dim=1, sorted=True)
    taken = offsets.gather(1, order[:, :, None].expand(-1, -1, 4))
    boxes = _decoded(taken)
    for image in range(scores.size(0)):
        kept = nms(boxes[image], best[image], min(AFTER, count))
        kept.cpu()
        boxes[image].index_select(0, kept)


def _decoded(offsets: torch.Tensor) -> torch.Tensor:
    """Offsets to corners, clipped to the image."""
    centre, size = offsets[..., :2] * 8.0 + 4.0, torch.exp(offsets[..., 2:].clamp(max=4.0)) * 8.0
    return torch.cat([centre - size * 0.5, centre + size * 0.5], dim=-1).clamp(min=0, max=1333.0)


def _overlap(boxes: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
    """Shared area of every object and box as a share of both together."""
    low = torch.max(objects[:, None, :2], boxes[None, :, :2])
    high = torch.min(objects[:, None, 2:], boxes[None, :, 2:])
    side = (high - low + 1.0).clamp(min=0)
    shared = side[:, :, 0] * side[:, :, 1]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return shared / (area[None, :] + 1.0 - shared)


class Head(nn.Module):
    """Pools boxes from four levels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, levels: list[torch.Tensor], boxes: torch.Tensor) -> torch.Tensor:
        """Features [boxes, channels, size, size]."""
        count = boxes.size(0)
        pooled = torch.zeros(count, CHANNELS, self.size, self.size, device=boxes.device)
        start = 0
        for level, share in zip(levels[:4], _LEVEL_SHARES, strict=True):
            inside = min(count - start, round(share * count))
            where = torch.arange(start, start + inside, device=boxes.device)
            pooled = pooled.index_put((where,), roi_align(level.float(), boxes[start : start + inside], self.size))
            start += inside
        return pooled


class MaskRcnn(nn.Module):
    """The detector with its five losses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.rpn, self.box_pool, self.mask_pool = Pyramid(), Proposals(), Head(7), Head(14)
        self.fc6, self.fc7 = nn.Linear(CHANNELS * 49, 1024), nn.Linear(1024, 1024)
        self.classes, self.corners = nn.Linear(1024, CLASSES), nn.Linear(1024, 4 * CLASSES)
        self.masks = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(4))
        self.grow, self.mask_scores = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2), nn.Conv2d(CHANNELS, CLASSES, 1)

    def forward(self, images: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
        """The sum of the losses; `objects` are boxes [batch, TARGETS, 4]."""
        levels = self.backbone(images)
        scores, offsets = self.rpn(levels)
        batch = images.size(0)
        loss = self._anchor_loss(scores, offsets, objects)
        count = min(ROIS, PROPOSALS // batch + TARGETS)
        boxes = torch.cat([self._sampled(objects[image], count) for image in range(batch)])
        x = self.box_pool(levels, boxes).flatten(1)
        x = F.relu(self.fc7(F.relu(self.fc6(x))))
        labels = torch.zeros(boxes.size(0), dtype=torch.int64, device=boxes.device)
        hit = boxes[: round(POSITIVE * boxes.size(0))]
        corners = self.corners(x)[: hit.size(0), :4]
        loss = loss + F.cross_entropy(self.classes(x), labels) + F.smooth_l1_loss(corners.float(), hit[:, 1:])
        x = self.mask_pool(levels, hit)
        for conv in self.masks:
            x = F.relu(conv(x))
        x = self.mask_scores(F.relu(self.grow(x)))[:, 0]
        return loss + F.binary_cross_entropy_with_logits(x.float(), torch.ones_like(x, dtype=torch.float32))

    def _anchor_loss(self, scores: torch.Tensor, offsets: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
        """Anchors matched to objects image by image; 256 of each count."""
        with torch.no_grad():
            anchors = torch.zeros(scores.size(1), 4, device=scores.device)
            for image in range(scores.size(0)):
                found, which = _overlap(anchors, objects[image]).max(dim=0)
                (found < 0.3).to(torch.float32).add_(which >= 0)
                objects[image][which].sub_(anchors)
                torch.nonzero_static(found > 0.7, size=128).cpu()
        chosen = torch.arange(256 * scores.size(0), device=scores.device)
        picked, moved = scores.flatten()[chosen], offsets.reshape(-1, 4)[chosen[:128]]
        wanted = torch.zeros_like(picked, dtype=torch.float32)
        loss = F.binary_cross_entropy_with_logits(picked.float(), wanted)
        return loss + F.smooth_l1_loss(moved.float(), torch.zeros_like(moved, dtype=torch.float32))

    def _sampled(self, objects: torch.Tensor, count: int) -> torch.Tensor:
        """The boxes of an image that train its heads, each with the number of its image."""
        with torch.no_grad():
            proposed = torch.zeros(2 * count, 4, device=objects.device)
            found, which = _overlap(proposed, objects).max(dim=0)
            chosen = torch.nonzero_static(found > 0.5, size=count).squeeze(1)
            chosen.cpu()
            objects[which[chosen]].sub_(proposed[chosen])
            return torch.cat([torch.zeros(count, 1, device=objects.device), proposed[chosen]], dim=1)
