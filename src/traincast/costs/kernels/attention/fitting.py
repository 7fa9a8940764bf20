"""How the weights of the attention features are found."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.attention.backward import BACKWARD_FEATURES
from traincast.costs.kernels.attention.parameters import AttentionParameters
from traincast.costs.kernels.attention.physics import (
    KERNEL_NAMES,
    cache_features,
    kernel_features,
    kernel_of,
    query_elements,
)
from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.model import Measurements
from traincast.costs.kernels.solve import relative_fit
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

_SAME_KERNEL = 16.0  # how much more a device with the same kernel says about one never measured
_TOWARDS_POOL = 0.1  # decides only what a device's own rows leave open, such as head dimensions it lacks
_KNEE = 0.1  # relative error beyond which a sample counts linearly (Huber); set by hand


def fit_weights(data: Measurements) -> AttentionParameters:
    """Weights per device and per kernel, from forward device times. Spreads are placeholders until `with_spread`."""
    parts, limits = [], []
    for index, device in enumerate(data.devices):
        mine = data.device == index
        calls = data.calls.take(mine)
        parts.append((_features(calls, device), data.seconds[mine]))
        length, dim = calls["q_len"], calls["head_dim"]
        limits.append([length.min(), length.max(), dim.min(), dim.max(), query_elements(calls).max()])
    kernels = [kernel_of(device) for device in data.devices]
    pooled = {name: _pooled(parts, [kernel == name for kernel in kernels]) for name in KERNEL_NAMES}
    weights = [_towards(pooled[name], *part) for name, part in zip(kernels, parts, strict=True)]
    size = len(data.devices)
    return AttentionParameters(
        Chips.of(data.devices), np.array(weights), np.array(list(pooled.values())), np.full(size, 0.15), 0.4,
        np.array(limits), np.zeros(len(BACKWARD_FEATURES)), 0.4,
    )  # fmt: skip


def _features(calls: Calls, device: Device) -> FloatArray:
    return np.concatenate([kernel_features(calls, device), cache_features(calls, device)], axis=1)


def _pooled(parts: list[tuple[FloatArray, FloatArray]], same: list[bool]) -> FloatArray:
    """One set of weights for all devices; each counts alike, those with the `same` kernel more."""
    matrix, seconds = (np.concatenate(part) for part in zip(*parts, strict=True))
    share = [np.sqrt((_SAME_KERNEL if s else 1.0) / len(p)) for s, (_, p) in zip(same, parts, strict=True)]
    return relative_fit(matrix, seconds, weight=np.repeat(share, [len(p) for _, p in parts]), knee=_KNEE)


def _towards(pooled: FloatArray, matrix: FloatArray, seconds: FloatArray) -> FloatArray:
    """Weights that fit these rows; what they leave open stays near the `pooled` weights."""
    known = np.flatnonzero(pooled > 0)
    prior = np.zeros((len(known), len(pooled)))
    prior[np.arange(len(known)), known] = 1.0 / pooled[known]
    weight = np.concatenate([np.ones(len(seconds)), np.full(len(known), np.sqrt(_TOWARDS_POOL))])
    rows, target = np.concatenate([matrix, prior]), np.concatenate([seconds, np.ones(len(known))])
    return relative_fit(rows, target, weight=weight, knee=_KNEE)
