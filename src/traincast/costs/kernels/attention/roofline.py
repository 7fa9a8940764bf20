"""Attention from first principles."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import flop_rate, memory_seconds
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

# of the sustained rate; set by hand, see the record's sigma
_ATTENTION_SHARE = {"forward": 0.55, "backward": 0.42, "efficient_forward": 0.35, "efficient_backward": 0.25}


def attention_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Two products forward, five backward; a causal mask skips half."""
    pairs = calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * (1.0 - 0.5 * calls["causal"])
    backward = calls.is_kind("backward", "efficient_backward")
    flops = pairs * calls["head_dim"] * np.where(backward, 10.0, 4.0)
    share = np.array([_ATTENTION_SHARE[kind] for kind in calls.family.kinds])[calls.kind]
    queries = calls["batch"] * calls["q_heads"] * calls["q_len"]
    keys = calls["batch"] * calls["kv_heads"] * calls["kv_len"]
    nbytes = np.where(backward, 4.0, 2.0) * (queries + keys) * calls["head_dim"] * calls.item_bytes()
    return np.asarray(
        2.0 * start + np.maximum(flops / (share * flop_rate(calls, device)), memory_seconds(nbytes, device))
    )
