"""Convolutions from first principles."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import flop_rate, memory_seconds, product_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

_WINOGRAD = 1.5  # fewer multiplications of 3x3 windows at stride 1, after the cost of its transforms
_CONV_SHARE = 0.85  # of a plain product of the same size


def output_positions(calls: Calls) -> FloatArray:
    """Positions of the output image of every (not transposed) convolution."""
    out = np.ones(len(calls))
    for side in ("h", "w"):
        reach = calls[f"dilation_{side}"] * (calls[f"kernel_{side}"] - 1.0) + 1.0
        out = out * (np.floor((calls[f"in_{side}"] + 2 * calls[f"pad_{side}"] - reach) / calls[f"stride_{side}"]) + 1.0)
    return out


def conv_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Implicit matrix product over output positions (data: input positions; weights: their gradients)."""
    groups, batch = calls["groups"], calls["batch"]
    channels, filters = calls["in_channels"] / groups, calls["out_channels"] / groups
    window = calls["kernel_h"] * calls["kernel_w"]
    positions, pixels = batch * output_positions(calls), batch * calls["in_h"] * calls["in_w"]
    data, weights = calls.is_kind("backward_data"), calls.is_kind("backward_weights")
    m = np.where(weights, filters, np.where(data, pixels, positions))
    n = np.where(weights, channels * window, np.where(data, channels, filters))
    k = np.where(weights, positions, np.where(data, filters * window * positions / pixels, channels * window))
    square = (window == 9) & (calls["stride_h"] * calls["stride_w"] == 1) & (groups == 1) & calls.is_compute("fp32")
    gain = np.where(square & ~weights, _WINOGRAD, 1.0) * _CONV_SHARE
    arithmetic = product_seconds(groups, m, n, np.maximum(k, 1.0), flop_rate(calls, device), device) / gain
    sizes = pixels * channels * groups + positions * filters * groups + channels * filters * window * groups
    return np.asarray(start + np.maximum(arithmetic, memory_seconds(sizes * calls.item_bytes(), device)))
