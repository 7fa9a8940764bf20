"""Matrix products from first principles."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import flop_rate, memory_seconds, product_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray


def gemm_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """The longer of whole waves of tiles and the operands' trip through memory."""
    batch, m, n, k = calls["batch"], calls["m"], calls["n"], calls["k"]
    nbytes = batch * (m * k + k * n + m * n) * calls.item_bytes()
    arithmetic = product_seconds(batch, m, n, k, flop_rate(calls, device), device)
    return np.asarray(start + np.maximum(arithmetic, memory_seconds(nbytes, device)))
