"""Softmax and normalisations from first principles: how often they pass over their rows."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import COPY_SHARE, memory_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

# reads and writes of a tensor the size of the input, as the kernels' code has them
_NORM_PASSES = {
    "layer_forward": 2.0, "layer_backward": 3.0, "layer_backward_weights": 2.0,
    "batch_forward": 3.0, "batch_backward": 5.0, "batch_inference": 2.0, "batch_statistics": 1.0,
    "batch_backward_own": 5.0,
}  # fmt: skip


def softmax_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """One read and one write, a second read backwards, and another pass over rows too wide for registers."""
    passes = np.where(calls.is_kind("backward", "log_backward"), 3.0, 2.0) + (calls["cols"] > 1024)
    return start + memory_seconds(passes * calls["rows"] * calls["cols"] * calls.item_bytes(), device)


def norm_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """As many passes over the rows as the kind of norm makes."""
    passes = np.array([_NORM_PASSES[kind] for kind in calls.family.kinds])[calls.kind]
    return 1.5 * start + memory_seconds(passes * calls["rows"] * calls["cols"] * calls.item_bytes(), device, COPY_SHARE)
