"""Mask R-CNN with a ResNet-50 and a feature pyramid, of its example; how many boxes there are is assumed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from traincast_evaluation.zoo.define.examples.coco import Batch
from traincast_evaluation.zoo.define.examples.detection import (
    POSITIVE,
    POSITIVE_ANCHORS,
    SAMPLED_ANCHORS,
    choose_proposals,
    compute_anchor_targets,
    compute_box_targets,
    find_set_places,
    make_anchors,
    match_to_objects,
    sample_boxes,
)
from traincast_evaluation.zoo.define.examples.detection_ops import mask_targets, roi_align

CHANNELS, CLASSES, ANCHORS = 256, 81, 3
_LEVEL_SHARES = (0.62, 0.22, 0.11, 0.05)  # assumed: which level a box is pooled from
_POLYGONS, _CORNERS = 1.3, 100  # assumed: polygons of an object, numbers of a polygon


class FrozenNorm(nn.Module):
    """Batch norm whose numbers are constants: folded in every step, then a product and a sum."""

    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "mean", "variance"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images in, images out."""
        if x.dtype == torch.float16:
            self.half()
        scale = self.weight * self.variance.rsqrt()
        bias = self.bias - self.mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


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


class Head(nn.Module):
    """Pools boxes from four levels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, levels: list[torch.Tensor], boxes: list[torch.Tensor]) -> torch.Tensor:
        """Features [boxes, channels, size, size] of the boxes of all images."""
        numbers = torch.cat([torch.full((len(b), 1), i, dtype=b.dtype, device="cuda") for i, b in enumerate(boxes)])
        corners = torch.cat([numbers, torch.cat(boxes)], dim=1)
        sides = torch.cat([(b[:, 2] - b[:, 0] + 1) * (b[:, 3] - b[:, 1] + 1) for b in boxes]).sqrt()
        fitting = torch.floor(4 + torch.log2(sides / 224 + 1e-6)).clamp(min=2, max=5).to(torch.int64) - 2
        count, left = corners.size(0), corners.size(0)
        pooled = torch.zeros(count, CHANNELS, self.size, self.size, dtype=levels[0].dtype, device="cuda")
        pooled = pooled.to(memory_format=torch.channels_last)
        for number, (level, share) in enumerate(zip(levels[:4], _LEVEL_SHARES, strict=True)):
            inside = min(left, round(share * count))
            where = find_set_places(fitting == number, inside)
            pooled[where] = roi_align(level.float(), corners[where], self.size).to(pooled.dtype)
            left -= inside
        return pooled


class MaskRcnn(nn.Module):
    """The detector with its five losses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.box_pool, self.mask_pool = Pyramid(), Head(7), Head(14)
        self.rpn = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.scores, self.offsets = nn.Conv2d(CHANNELS, ANCHORS, 1), nn.Conv2d(CHANNELS, 4 * ANCHORS, 1)
        self.fc6, self.fc7 = nn.Linear(CHANNELS * 49, 1024), nn.Linear(1024, 1024)
        self.classes, self.corners = nn.Linear(1024, CLASSES), nn.Linear(1024, 4 * CLASSES)
        self.masks = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(4))
        self.grow, self.mask_scores = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2), nn.Conv2d(CHANNELS, CLASSES, 1)

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        """The losses."""
        levels = self.backbone(batch.images)
        hidden = [F.relu(self.rpn(level)) for level in levels]
        scores, offsets = [self.scores(h) for h in hidden], [self.offsets(h) for h in hidden]
        grids, inside = make_anchors(levels, batch.images.size(0))
        boxes = choose_proposals(scores, offsets, grids, batch.objects)
        losses = self._anchor_losses(scores, offsets, torch.cat(grids), inside, batch)
        with torch.no_grad():
            trained = [
                compute_box_targets(b, o, c) for b, o, c in zip(boxes, batch.objects, batch.classes, strict=True)
            ]
        x = self.box_pool(levels, [t[0] for t in trained]).flatten(1)
        x = F.relu(self.fc7(F.relu(self.fc6(x))))
        losses += self._box_losses(self.classes(x), self.corners(x), trained)
        return [*losses, self._mask_loss(levels, trained, batch)]

    def _anchor_losses(
        self, scores: list[torch.Tensor], offsets: list[torch.Tensor], anchors: torch.Tensor, inside: torch.Tensor,
        batch: Batch,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Anchors matched to objects image by image; 256 of each count."""
        images = batch.images.size(0)
        with torch.no_grad():
            targets = [compute_anchor_targets(anchors, inside, objects) for objects in batch.objects]
            masks = [sample_boxes(labels, SAMPLED_ANCHORS, POSITIVE_ANCHORS) for labels, _ in targets]
            hit = find_set_places(torch.cat([mask for mask, _ in masks]), images * POSITIVE_ANCHORS)
            missed = find_set_places(
                torch.cat([mask for _, mask in masks]), images * (SAMPLED_ANCHORS - POSITIVE_ANCHORS)
            )
            chosen = torch.cat([hit, missed])
        rated = torch.cat([s.permute(0, 2, 3, 1).reshape(images, -1) for s in scores], dim=1).reshape(-1)
        moved = torch.cat([o.permute(0, 2, 3, 1).reshape(images, -1, 4) for o in offsets], dim=1).reshape(-1, 4)
        labels, wanted = torch.cat([t[0] for t in targets]), torch.cat([t[1] for t in targets])
        box = _smooth(moved[hit], wanted[hit], 1 / 9) / chosen.numel()
        return [F.binary_cross_entropy_with_logits(rated[chosen].float(), labels[chosen]), box]

    def _box_losses(
        self, classes: torch.Tensor, corners: torch.Tensor, trained: list[tuple[torch.Tensor, ...]]
    ) -> list[torch.Tensor]:
        labels, wanted = torch.cat([t[1] for t in trained]), torch.cat([t[2] for t in trained])
        hit = find_set_places(labels > 0, round(POSITIVE * labels.numel()))
        columns = 4 * labels[hit][:, None] + torch.tensor([0, 1, 2, 3], device="cuda")
        box = _smooth(corners[hit[:, None], columns], wanted[hit], 1.0) / labels.numel()
        return [F.cross_entropy(classes.float(), labels), box]

    def _mask_loss(
        self, levels: list[torch.Tensor], trained: list[tuple[torch.Tensor, ...]], batch: Batch
    ) -> torch.Tensor:
        """Of the boxes that hit an object."""
        boxes, labels, masks = [], [], []
        for corners, classes, offsets, scores in trained:
            hit = find_set_places(classes > 0, round(POSITIVE * classes.numel()))
            boxes.append(corners[hit])
            for field in (classes, offsets, scores):  # carried along
                field[hit]
        x = self.mask_pool(levels, boxes)
        for conv in self.masks:
            x = F.relu(conv(x))
        x = self.mask_scores(F.relu(self.grow(x)))
        for corners, objects, classes in zip(boxes, batch.objects, batch.classes, strict=True):
            drawn, kinds = _drawn(corners, objects, classes, x.size(-1))
            masks.append(drawn)
            labels.append(kinds)
        kinds = torch.cat(labels)
        hit = find_set_places(kinds > 0, kinds.numel())
        return F.binary_cross_entropy_with_logits(x[hit, kinds[hit]].float(), torch.cat(masks))


@torch.no_grad()
def _drawn(
    corners: torch.Tensor, objects: torch.Tensor, classes: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the objects that an image's boxes hit, and their classes.

    The polygons are on the host: the program asks the device for the number of every box's object, one by one, twice.
    """
    number, _ = match_to_objects(objects, corners)
    labels = classes[number.clamp(min=0)].to(torch.int64)
    for which in number.clamp(min=0):
        which.item()
    labels.masked_fill_(number == -1, 0)
    places = find_set_places(labels > 0, labels.numel())
    for which in places:
        which.item()
    polygons = torch.zeros(round(_POLYGONS * corners.size(0)) * _CORNERS, dtype=torch.float64, device="cpu")
    return mask_targets(polygons.to("cuda"), corners[places], size), labels


def _smooth(moved: torch.Tensor, wanted: torch.Tensor, beta: float) -> torch.Tensor:
    """A square below `beta`, linear above, summed."""
    distance = torch.abs(moved - wanted)
    return torch.where(distance < beta, 0.5 * distance**2 / beta, distance - 0.5 * beta).sum()
