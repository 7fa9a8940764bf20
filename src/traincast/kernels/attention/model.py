"""Fused attention: physical features of the kernel, weighted by a fit per device."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

import numpy as np

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.attention import ATTENTION
from traincast.kernels.attention.parameters import AttentionParameters
from traincast.kernels.attention.physics import (
    FEATURES,
    FUSED_TYPES,
    cache_features,
    kernel_features,
    query_elements,
)
from traincast.kernels.call import Calls, Estimate, Family
from traincast.kernels.model import Measurements, ParametricModel
from traincast.platform.device import Device

_BACKWARD = 2.8  # five products where the forward has two, recomputation included, at slightly lower efficiency
_PLAIN_SHARE = 0.45  # of the fp32 peak that the memory-efficient kernel reaches without tensor cores
_UNMEASURED = 0.35  # log-sigma added to what no row has (backward, fp32, no mask): assumed, a factor of 1.4


class AttentionModel(ParametricModel[AttentionParameters]):
    """Flash-style attention. Fitted state: `parameters_`. Backward and fp32 are derived, and say so."""

    family: ClassVar[Family] = ATTENTION
    parameters = AttentionParameters

    def fit(self, data: Measurements) -> Self:
        """From forward device times in half precision, the copy into a server's cache included."""
        from traincast.kernels.attention.fitting import fit_weights

        self.parameters_ = fit_weights(data)
        return self

    def with_spread(self, sigma: FloatArray, unseen_sigma: float) -> Self:
        """The same model with these spreads."""
        return type(self)(replace(self.fitted, sigma=sigma, unseen_sigma=unseen_sigma))

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        parameters = self.fitted
        fused = calls.is_compute(*[name for name in FUSED_TYPES if name in device.peak_flops])
        seconds = kernel_features(calls, device) @ parameters.weights_on(device)[: len(FEATURES)]
        if not fused.all():
            seconds = np.where(fused, seconds, _plain_seconds(calls, device))
        backward = calls.is_kind("backward")
        seconds = np.where(backward, _BACKWARD, 1.0) * seconds
        row = parameters.chips.find(device)
        sigma = parameters.unseen_sigma if row < 0 else float(parameters.sigma[row])
        measured = fused & ~backward & (calls["causal"] == 1) & (calls["q_len"] == calls["kv_len"])
        if row >= 0:
            measured &= _within(calls, parameters.limits[row])
        return Estimate(seconds, np.where(measured, sigma, np.hypot(sigma, _UNMEASURED)), measured & (row >= 0))

    def predict_served(self, calls: Calls, device: Device) -> Estimate:
        """As a server times forward calls: with the copy of keys and values into its cache, which training lacks."""
        estimate = self.predict(calls, device)
        copy = cache_features(calls, device) @ self.fitted.weights_on(device)[len(FEATURES) :]
        return replace(estimate, seconds=estimate.seconds + copy)


def _within(calls: Calls, limits: FloatArray) -> BoolArray:
    """Which calls have the sizes of fitted ones."""
    shortest, longest, narrow, wide, most = limits
    length, dim = calls["q_len"], calls["head_dim"]
    return np.asarray(
        (length >= shortest) & (length <= longest) & (dim >= narrow) & (dim <= wide) & (query_elements(calls) <= most)
    )


def _plain_seconds(calls: Calls, device: Device) -> FloatArray:
    """The memory-efficient kernel in a type without tensor cores: products at a share of the peak."""
    causal = np.where(calls["causal"] > 0, 0.5, 1.0)
    products = 4.0 * calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * calls["head_dim"] * causal
    moved = calls["batch"] * calls["head_dim"] * calls.item_bytes()
    moved = 2.0 * moved * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    return np.asarray(8e-6 + products / (_PLAIN_SHARE * device.sustained("fp32")) + moved / device.dram_bandwidth)
