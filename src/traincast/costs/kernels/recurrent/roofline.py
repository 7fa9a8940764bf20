"""A recurrent layer's time steps from first principles: one after the other, a product and its cell each."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import flop_rate, memory_seconds, product_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

_KERNELS = 2.0  # a step: the product with the recurrent matrix, and the cell's pointwise part
_QUEUED = 0.5  # of a kernel's start that is left where the next one waits in the queue already: assumed
_CELL_TENSORS = {"forward": 4.0, "backward": 6.0}  # of the gates' size, that a cell reads and writes: gates, state


def recurrent_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every step waits for the one before. The recurrent matrix comes from memory once a step, out of the L2 where it
    fits there; that cuDNN's persistent kernels keep it in registers is left to the interval."""
    batch, gates = calls["batch"], calls["gates"] * calls["hidden"]
    backward = calls.is_kind("backward")
    columns, depth = np.where(backward, calls["outputs"], gates), np.where(backward, gates, calls["outputs"])
    product = product_seconds(calls["directions"], batch, columns, depth, flop_rate(calls, device), device)
    matrix = calls["directions"] * gates * calls["outputs"] * calls.item_bytes()
    tensors = np.array([_CELL_TENSORS[kind] for kind in calls.family.kinds])[calls.kind]
    cell = memory_seconds(tensors * calls["directions"] * batch * gates * calls.item_bytes(), device)
    step = np.maximum(product, memory_seconds(matrix, device)) + cell + _KERNELS * _QUEUED * start
    return np.asarray(start + calls["steps"] * step)
