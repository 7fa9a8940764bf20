"""torchvision beside a PyTorch that its library was not built for: two ops it registers must exist."""

from __future__ import annotations

from importlib.util import find_spec

import torch

_KEPT = []


def define_missing() -> None:
    """Defines what `import torchvision` expects its library to have defined."""
    if find_spec("torchvision") is None or _KEPT:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _KEPT.append(library)
