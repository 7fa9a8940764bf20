"""The backward of fused attention: blocks of keys walk over tiles of queries, five products a tile."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.attention.physics import FUSED_TYPES, WARM_SECONDS
from traincast.costs.kernels.call import Calls
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

BACKWARD_FEATURES = ("start", "products", "longest block", "heat", "heads beyond 128")
BACKWARD_KERNEL = "tensorrt"
"""The generation whose backward was measured; elsewhere it is a multiple of the forward."""
_TILE = 128.0  # keys of a block, and queries of a step
_PRODUCTS = 10.0  # flop for each pair of positions and element of a head: five products, one of them made again


def backward_features(calls: Calls, device: Device) -> FloatArray:
    """Seconds-like columns, in the order of `BACKWARD_FEATURES`."""
    sms, dim = float(device.num_sms), calls["head_dim"]
    rate = calls.per_compute({name: device.sustained(name) for name in FUSED_TYPES}, device.sustained("fp16")) / sms
    turn = _PRODUCTS * _TILE * _TILE * dim / rate
    most = np.ceil(calls["q_len"] / _TILE)
    blocks = calls["batch"] * calls["q_heads"] * np.ceil(calls["kv_len"] / _TILE)
    # a causal mask leaves half of the tiles, and those on the diagonal
    steps = np.where(calls["causal"] > 0, 0.5 * (most + 1.0), most)
    total = turn * blocks * steps / sms
    warm = np.square(total / WARM_SECONDS)
    columns = [
        np.full(len(calls), 1e3 / (1e6 * device.effective_clock_mhz)), total, turn * most,
        total * warm / (1.0 + warm), np.where(dim > 128, total, 0.0),
    ]  # fmt: skip
    return np.stack(columns, axis=1)
