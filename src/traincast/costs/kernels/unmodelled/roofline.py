"""Ops without a model from first principles: the longer of arithmetic and memory."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import flop_rate, memory_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

# of the sustained rate: products as libraries do them at middling sizes; factorisations wait for one column after the
# other (assumed, within the interval of the family)
_SHARE = {"stream": 0.5, "product": 0.6, "factorisation": 0.1}


def unmodelled_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every byte once, or the flops at a share of what the device sustains, whichever takes longer."""
    share = np.array([_SHARE[kind] for kind in calls.family.kinds])[calls.kind]
    rate = share * np.where(calls.is_kind("product"), flop_rate(calls, device), device.sustained("fp32"))
    moved = memory_seconds(calls["bytes_read"] + calls["bytes_written"], device)
    return np.asarray(start + np.maximum(calls["flops"] / rate, moved))
