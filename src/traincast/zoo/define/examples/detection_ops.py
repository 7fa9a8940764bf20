"""Ops of a detector that PyTorch itself does not have: RoI align and non-maximum suppression, without values."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("traincast_examples::roi_align", mutates_args=())
def roi_align(features: torch.Tensor, boxes: torch.Tensor, size: int) -> torch.Tensor:
    """Features inside each box [boxes, channels, size, size]."""
    return features.new_empty(boxes.size(0), features.size(1), size, size)


@roi_align.register_fake
def _(features: torch.Tensor, boxes: torch.Tensor, size: int) -> torch.Tensor:
    return features.new_empty(boxes.size(0), features.size(1), size, size)


@torch.library.custom_op("traincast_examples::roi_align_backward", mutates_args=())
def roi_align_backward(gradient: torch.Tensor, boxes: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Gradient of the features."""
    return gradient.new_zeros(shape)


@roi_align_backward.register_fake
def _(gradient: torch.Tensor, boxes: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return gradient.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    features, boxes, _ = inputs
    ctx.shape = list(features.shape)
    ctx.save_for_backward(boxes)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    (boxes,) = ctx.saved_tensors
    return roi_align_backward(gradient, boxes, ctx.shape), None, None


roi_align.register_autograd(_gradients, setup_context=_keep)


@torch.library.custom_op("traincast_examples::nms", mutates_args=())
def nms(boxes: torch.Tensor, scores: torch.Tensor, kept: int) -> torch.Tensor:
    """Numbers of the boxes that stay; how many is given."""
    return scores.new_zeros(kept, dtype=torch.int64)


@nms.register_fake
def _(boxes: torch.Tensor, scores: torch.Tensor, kept: int) -> torch.Tensor:
    return scores.new_empty(kept, dtype=torch.int64)
