"""Boxes of a detector's example: anchors, proposals, matching and sampling, image by image as its program does it.

How many boxes there are depends on values and is assumed; where the program has the device tell the host a number, the
host waits here too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from traincast_evaluation.zoo.define.examples.detection_ops import (
    box_overlap,
    decode_boxes,
    encode_boxes,
    match_boxes,
    overlapping,
)

BEFORE, AFTER = 2000, 1000  # boxes of a level and image before suppression, and those assumed to stay
PROPOSALS, ROIS, TARGETS = 4000, 512, 8  # best boxes of a whole batch, most of an image; objects assumed of an image
POSITIVE = 0.25  # share of the boxes that is assumed to hit an object
SAMPLED_ANCHORS, POSITIVE_ANCHORS = 256, 16  # anchors of an image that count; assumed: how many of them hit an object
STRIDES = (4, 8, 16, 32, 64)


class Boxes(NamedTuple):
    """Boxes of an image with what the program keeps alongside them."""

    corners: torch.Tensor
    scores: torch.Tensor


def find_set_places(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Where `mask` is set, in `count` places, which the device tells the host."""
    places = torch.nonzero_static(mask, size=count).squeeze(1)
    mask.sum().item()
    return places


def make_anchors(levels: list[torch.Tensor], images: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Anchors of every level [anchors, 4], and of the last image which of all are inside it."""
    grids = []
    for level, stride in zip(levels, STRIDES, strict=True):
        down, right = (torch.arange(0, size * stride, stride, device="cuda", dtype=torch.float32)
                       for size in level.shape[-2:])  # fmt: skip
        y, x = torch.meshgrid(down, right, indexing="ij")
        y, x = y.reshape(-1), x.reshape(-1)
        cells = torch.zeros(3, 4, device="cuda")
        grids.append((torch.stack((x, y, x, y), dim=1).view(-1, 1, 4) + cells).reshape(-1, 4))
    for _ in range(images):
        inside = [
            (grid[..., 0] >= 0) & (grid[..., 1] >= 0) & (grid[..., 2] < 1200) & (grid[..., 3] < 800) for grid in grids
        ]
    return grids, torch.cat(inside)


@torch.no_grad()
def choose_proposals(
    scores: list[torch.Tensor], offsets: list[torch.Tensor], grids: list[torch.Tensor], objects: torch.Tensor
) -> list[Boxes]:
    """The best boxes of each image, those of its objects added."""
    images = objects.size(0)
    by_level = [_choose_level_proposals(*level, images) for level in zip(scores, offsets, grids, strict=True)]
    joined = [
        Boxes(torch.cat([level[i].corners for level in by_level]), torch.cat([level[i].scores for level in by_level]))
        for i in range(images)
    ]
    every = torch.cat([boxes.scores for boxes in joined])
    _, best = torch.topk(every, min(PROPOSALS, every.numel()), sorted=True)
    chosen = torch.zeros_like(every, dtype=torch.bool)
    chosen[best] = 1
    each = min(ROIS, PROPOSALS // images)
    result = []
    for i, mask in enumerate(chosen.split([boxes.scores.numel() for boxes in joined])):
        corners, kept = joined[i].corners[find_set_places(mask, each)], joined[i].scores[find_set_places(mask, each)]
        ones = torch.ones(objects.size(1), device="cuda")
        result.append(Boxes(torch.cat([corners, objects[i]]), torch.cat([kept, ones])))
    return result


def _choose_level_proposals(score: torch.Tensor, offset: torch.Tensor, grid: torch.Tensor, images: int) -> list[Boxes]:
    """The best boxes of a level: decoded and clipped, small and overlapping ones left out image by image."""
    ratings = score.reshape(images, -1).sigmoid()
    ratings, order = ratings.topk(min(BEFORE, ratings.size(1)), dim=1, sorted=True)
    torch.tensor([[1200, 800]] * images, device="cuda").float()
    anchors = torch.cat([grid] * images).reshape(images, -1, 4)
    corners, large = decode_boxes(offset.float(), anchors, order)
    ratings, large = ratings.float(), large.to(torch.bool)
    result = []
    for image in range(images):
        count = large.size(1)
        left, rated = (
            corners[image][find_set_places(large[image], count)],
            ratings[image][find_set_places(large[image], count)],
        )
        kept = _suppress_overlapping(left, rated, min(AFTER, count))
        result.append(Boxes(left[kept], rated[kept]))
    return result


def _suppress_overlapping(corners: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers of the boxes that stay: the device tells which overlap, the host chooses."""
    rated = torch.cat([corners, scores[:, None]], dim=1)
    _, order = rated.select(1, 4).sort(0, descending=True)
    overlapping(rated.index_select(0, order)).cpu()
    kept = torch.zeros(count, dtype=torch.int64, device="cpu").to("cuda")
    return order[kept].sort(0)[0]


def match_to_objects(objects: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of each box's object, and that object's corners."""
    number = match_boxes(box_overlap(objects, boxes))
    return number, objects[number.clamp(min=0)]


def sample_boxes(labels: torch.Tensor, most: int, positive: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the boxes that count: some that hit an object and others, drawn at random."""
    masks: list[torch.Tensor] = []
    for wanted, available in ((labels >= 1, 2 * positive), (labels == 0, labels.numel() - 2 * positive)):
        count = positive if not masks else min(most - positive, available)
        places = find_set_places(wanted, available)
        drawn = places[torch.randperm(available, device="cuda")[:count]]
        mask = torch.zeros_like(labels, dtype=torch.uint8)
        mask[drawn] = 1
        masks.append(mask)
    return masks[0], masks[1]


def compute_anchor_targets(
    anchors: torch.Tensor, inside: torch.Tensor, objects: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and offsets wanted of every anchor of an image."""
    number, wanted = match_to_objects(objects, anchors)
    labels = (number >= 0).to(torch.float32)
    labels.masked_fill_(~inside, -1)
    labels.masked_fill_(number == -2, -1)
    return labels, encode_boxes(wanted, anchors)


def compute_box_targets(boxes: Boxes, objects: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Corners, labels and offsets of the boxes of an image that train its heads; as many as it has are kept."""
    number, wanted = match_to_objects(objects, boxes.corners)
    labels = classes[number.clamp(min=0)].to(torch.int64)
    labels.masked_fill_(number == -1, 0)
    labels.masked_fill_(number == -2, -1)
    offsets = encode_boxes(wanted, boxes.corners)
    count = boxes.corners.size(0)
    hit, missed = sample_boxes(labels, ROIS, round(POSITIVE * count))
    kept = find_set_places(hit | missed, count)
    return boxes.corners[kept], labels[kept], offsets[kept], boxes.scores[kept]
