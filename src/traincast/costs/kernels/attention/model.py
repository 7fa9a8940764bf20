"""Fused attention: physical features of the kernel, weighted by a fit per device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.attention.backward import BACKWARD_KERNEL, backward_features
from traincast.costs.kernels.attention.parameters import AttentionParameters
from traincast.costs.kernels.attention.physics import (
    FEATURES,
    FUSED_TYPES,
    cache_features,
    kernel_features,
    kernel_of,
    query_elements,
)
from traincast.costs.kernels.call import Calls, Estimate, Family
from traincast.costs.kernels.model import Measurements, ParametricModel
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

# five products where the forward has two, recomputation included, at slightly lower efficiency; only where no
# backward was measured
_BACKWARD = 2.8
_PLAIN_SHARE = 0.45  # of the fp32 peak that the memory-efficient kernel reaches without tensor cores
# of the tensor cores' peak that it reaches in half precision (assumed: it re-reads what flash keeps in registers)
_EFFICIENT_SHARE = 0.35
_UNMEASURED = 0.35  # log-sigma added to what no row has (backward before Blackwell, fp32): assumed, a factor of 1.4
# PyTorch's fused attention on AMD's chips is written in Triton, which reaches 0.73 of the second flash attention's
# rate: what training steps on NVIDIA's chips say of the two (training/data/constants.toml). None was measured on AMD's
_TRITON = 0.73
_UNMASKED = 0.18  # the same without a causal mask: held-out rows of kernels/attention_encoder, which took no part


class AttentionModel(ParametricModel[AttentionParameters]):
    """Flash-style attention. Fitted state: `parameters_`. fp32, and the backward before Blackwell, are
    derived, and say so."""

    family: ClassVar[Family] = ATTENTION
    parameters = AttentionParameters

    def fit(self, data: Measurements) -> Self:
        """From forward device times in half precision, the copy into a server's cache included."""
        from traincast.costs.kernels.attention.fitting import fit_weights

        self.parameters_ = fit_weights(data)
        return self

    def with_backward(self, weights: FloatArray, sigma: float) -> Self:
        """The same model with these weights of `BACKWARD_FEATURES` and their spread."""
        return type(self)(replace(self.fitted, backward=weights, backward_sigma=sigma))

    def with_spread(self, sigma: FloatArray, unseen_sigma: float) -> Self:
        """The same model with these spreads."""
        return type(self)(replace(self.fitted, sigma=sigma, unseen_sigma=unseen_sigma))

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        parameters = self.fitted
        efficient = calls.is_kind("efficient_forward", "efficient_backward")
        fused = calls.is_compute(*[name for name in FUSED_TYPES if name in device.peak_flops]) & ~efficient
        seconds = kernel_features(calls, device) @ parameters.weights_on(device)[: len(FEATURES)]
        foreign = device.vendor == "amd"
        if foreign:
            seconds = seconds / _TRITON
        if not fused.all():
            seconds = np.where(fused, seconds, _plain_seconds(calls, device))
        backward = calls.is_kind("backward", "efficient_backward")
        known_backward = backward & fused & self._measured_backward(device)
        seconds = np.where(backward, _BACKWARD, 1.0) * seconds
        if known_backward.any():
            seconds = np.where(known_backward, backward_features(calls, device) @ parameters.backward, seconds)
        row = parameters.chips.find(device)
        sigma = parameters.unseen_sigma if row < 0 else float(parameters.sigma[row])
        sigma = math.hypot(sigma, _UNMEASURED) if foreign else sigma
        measured = fused & ~backward & (calls["causal"] == 1) & (calls["q_len"] == calls["kv_len"])
        factor = _factor_outside(calls, parameters.limits[row]) if row >= 0 else np.ones(len(calls))
        factor = np.where(measured, factor, 1.0)  # of other kinds nothing was measured, whatever their sizes
        measured &= factor <= 1.0
        open_ = fused & ~backward & (calls["causal"] == 0)
        spread = np.where(measured, sigma, np.hypot(sigma, np.where(open_, _UNMASKED, _UNMEASURED)))
        # another chip of the generation is known as well as its forward is
        spread = np.where(known_backward, np.hypot(parameters.backward_sigma, sigma), spread)
        new_gpu = np.full(len(calls), row < 0)
        return Estimate(seconds, spread, measured & ~new_gpu, factor, new_gpu)

    def _measured_backward(self, device: Device) -> bool:
        return kernel_of(device) == BACKWARD_KERNEL and bool(self.fitted.backward.any())

    def predict_served(self, calls: Calls, device: Device) -> Estimate:
        """As a server times forward calls: with the copy of keys and values into its cache, which training lacks."""
        estimate = self.predict(calls, device)
        copy = cache_features(calls, device) @ self.fitted.weights_on(device)[len(FEATURES) :]
        return replace(estimate, seconds=estimate.seconds + copy)


def _factor_outside(calls: Calls, limits: FloatArray) -> FloatArray:
    """How many times the farthest size of a call lies beyond those of fitted ones; 1 inside."""
    shortest, longest, narrow, wide, most = limits
    length, dim = np.maximum(calls["q_len"], 1.0), np.maximum(calls["head_dim"], 1.0)
    ratios = (shortest / length, length / longest, narrow / dim, dim / wide, query_elements(calls) / most)
    return np.asarray(np.maximum(np.max(ratios, axis=0), 1.0))


def _plain_seconds(calls: Calls, device: Device) -> FloatArray:
    """The memory-efficient kernel, with or without tensor cores for the type: products at a share of the peak."""
    causal = np.where(calls["causal"] > 0, 0.5, 1.0)
    products = 4.0 * calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * calls["head_dim"] * causal
    moved = calls["batch"] * calls["head_dim"] * calls.item_bytes()
    moved = 2.0 * moved * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    plain = _PLAIN_SHARE * device.sustained("fp32")
    half = {name: _EFFICIENT_SHARE * device.sustained(name) for name in FUSED_TYPES if name in device.peak_flops}
    return np.asarray(8e-6 + products / calls.per_compute(half, plain) + moved / device.dram_bandwidth)
