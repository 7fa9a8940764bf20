"""Kernels of a detector that PyTorch itself does not have, without values: boxes, matching, suppression, RoI align."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

DETECTION_COSTS = {
    # four samples of four corners each for every element; going back, each is an atomic sum into a sector of 32 bytes
    "traincast_examples::roi_align": {"bytes": "4 * 4 * 4 * out0.numel"},
    "traincast_examples::roi_align_backward": {"bytes": "4 * 4 * 32 * in0.numel + out0.bytes"},
    "traincast_examples::overlapping": {"flops": "16 * in0[0] ** 2", "bytes": "out0.bytes"},
    "traincast_examples::decode_boxes": {"bytes": "4 * out0.bytes + out1.bytes"},
    "traincast_examples::box_overlap": {"bytes": "in0.bytes + in1.bytes + out0.bytes"},
    "traincast_examples::match_boxes": {"bytes": "2 * in0.bytes + out0.bytes"},
    "traincast_examples::encode_boxes": {"bytes": "in0.bytes + in1.bytes + out0.bytes"},
    "traincast_examples::mask_targets": {"bytes": "in0.bytes + 2 * out0.bytes"},
}
"""What these kernels cost, by formulas: assumed from what they read and write."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_WORD = 64  # boxes of one word of the table that says which overlap


def _without_values(name: str) -> Callable[[_Function], _Function]:
    """The op `traincast_examples::NAME` of a function that only makes its outputs."""

    def define(function: _Function) -> _Function:
        op = torch.library.custom_op(f"traincast_examples::{name}", function, mutates_args=())
        op.register_fake(function)
        return cast(_Function, op)

    return define


@_without_values("roi_align")
def roi_align(features: torch.Tensor, boxes: torch.Tensor, size: int) -> torch.Tensor:
    """Features inside each box [boxes, channels, size, size]."""
    return features.new_empty(boxes.size(0), features.size(1), size, size)


@_without_values("roi_align_backward")
def roi_align_backward(gradient: torch.Tensor, boxes: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Gradient of the features."""
    return gradient.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    features, boxes, _ = inputs
    ctx.shape = list(features.shape)
    ctx.save_for_backward(boxes)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    (boxes,) = ctx.saved_tensors
    return roi_align_backward(gradient, boxes, ctx.shape), None, None


cast(Any, roi_align).register_autograd(_gradients, setup_context=_keep)


@_without_values("overlapping")
def overlapping(boxes: torch.Tensor) -> torch.Tensor:
    """Which boxes overlap which others, a bit each."""
    return boxes.new_empty(boxes.size(0), -(-boxes.size(0) // _WORD), dtype=torch.int64)


@_without_values("decode_boxes")
def decode_boxes(offsets: torch.Tensor, anchors: torch.Tensor, order: torch.Tensor) -> list[torch.Tensor]:
    """Corners [images, boxes, 4] of the anchors chosen by `order`, clipped, and which are large enough."""
    images, count = order.shape
    return [offsets.new_empty(images, count, 4), offsets.new_empty(images, count, dtype=torch.uint8)]


@_without_values("box_overlap")
def box_overlap(objects: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Shared area of every object and box as a share of both together [objects, boxes]."""
    return objects.new_empty(objects.size(0), boxes.size(0))


@_without_values("match_boxes")
def match_boxes(overlap: torch.Tensor) -> torch.Tensor:
    """The object of every box; below 0 where there is none."""
    return overlap.new_empty(overlap.size(1), dtype=torch.int64)


@_without_values("encode_boxes")
def encode_boxes(wanted: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """What would move the boxes onto the wanted ones."""
    return torch.empty_like(boxes)


@_without_values("mask_targets")
def mask_targets(corners: torch.Tensor, boxes: torch.Tensor, size: int) -> torch.Tensor:
    """Polygons drawn inside boxes [boxes, size, size]."""
    return boxes.new_empty(boxes.size(0), size, size)
