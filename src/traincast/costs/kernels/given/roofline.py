"""Seconds of ops whose cost is given."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import flop_rate, memory_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray


def given_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """What is given, or the longer of flops at the sustained rate and bytes at the bandwidth; a start on top of the
    latter two."""
    work = np.maximum(calls["flops"] / flop_rate(calls, device), memory_seconds(calls["bytes"], device))
    return np.asarray(np.maximum(calls["seconds"], np.where(work > 0, start + work, 0.0)))
