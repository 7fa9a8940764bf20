"""Fused attention: physical features of the kernel, weighted by a fit per device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.attention.physics import (
    FEATURES,
    FUSED_TYPES,
    KERNEL_NAMES,
    choose_attention_kernel,
    compute_attention_backward_features,
    compute_attention_features,
    count_query_elements,
)
from traincast.costs.kernels.contract import ArrayRecord, Calls, Chips, Estimate, Family, ParametricModel
from traincast.hardware.device import AMPERE, Device
from traincast.utils.arrays import FloatArray

# five GEMMs where the forward has two, recomputation included, at slightly lower efficiency; only where no
# backward was measured
_BACKWARD = 2.8
_PLAIN_SHARE = 0.45  # of the fp32 peak that the memory-efficient kernel reaches without tensor cores
# since Ampere each of its products in fp32 is three in TF32, at a share of their peak: SAM on A100, five shapes; RTX
# 3060's traces, not in view, are 2 to 8 % longer
_THREE_TF32_SHARE = 0.44 / 3.0
_TILE = 64.0  # queries of a block, keys of a step and elements of the head, the last two twice as many of wider heads
# of the tensor cores' peak that it reaches in half precision (assumed: it re-reads what flash keeps in registers)
_EFFICIENT_SHARE = 0.35
_UNMEASURED = 0.35  # log-sigma added to what no row has (backward before Hopper, fp32): assumed, a factor of 1.4
# PyTorch's fused attention on AMD's chips is written in Triton, which reaches 0.73 of the second flash attention's
# rate: what training steps on NVIDIA's chips say of the two (costs/data/in_step.toml). None was measured on AMD's
_TRITON = 0.73
_UNMASKED = 0.18  # the same without a causal mask: held-out rows of kernels/attention_encoder, which took no part


@dataclass(frozen=True, slots=True)
class AttentionParameters(ArrayRecord):
    """Feature weights per device (those of the cache copy last), pooled ones per kernel, spreads, fitted sizes."""

    chips: Chips
    weights: FloatArray
    pooled: FloatArray  # a row for each of `KERNEL_NAMES`
    sigma: FloatArray
    unseen_sigma: float
    limits: FloatArray  # per device: least and largest query length and head dimension, most elements of the query
    backward: FloatArray  # weights of `BACKWARD_FEATURES`, a row for each of `KERNEL_NAMES`; 0 where none was measured
    backward_sigma: FloatArray  # of each kernel

    def weights_on(self, device: Device) -> FloatArray:
        """Weights of the device, of its chip, or of its kernel on other devices."""
        row = self.chips.find(device)
        return np.asarray(
            self.pooled[KERNEL_NAMES.index(choose_attention_kernel(device))] if row < 0 else self.weights[row]
        )


class AttentionModel(ParametricModel[AttentionParameters]):
    """Flash-style attention. Fitted state: `parameters_`. fp32, and the backward before Hopper, are derived, and say
    so."""

    family: ClassVar[Family] = ATTENTION
    parameters = AttentionParameters

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        parameters = self.parameters_
        efficient = calls.is_kind("efficient_forward", "efficient_backward")
        fused = calls.is_compute(*[name for name in FUSED_TYPES if name in device.peak_flops]) & ~efficient
        seconds = compute_attention_features(calls, device) @ parameters.weights_on(device)[: len(FEATURES)]
        foreign = device.vendor == "amd"
        if foreign:
            seconds = seconds / _TRITON
        if not fused.all():
            seconds = np.where(fused, seconds, _estimate_plain_seconds(calls, device))
        backward = calls.is_kind("backward", "efficient_backward")
        kernel = KERNEL_NAMES.index(choose_attention_kernel(device))
        known_backward = backward & fused & bool(parameters.backward[kernel].any() and device.vendor == "nvidia")
        seconds = np.where(backward, _BACKWARD, 1.0) * seconds
        if known_backward.any():
            measured_backward = compute_attention_backward_features(calls, device) @ parameters.backward[kernel]
            seconds = np.where(known_backward, measured_backward, seconds)
        row = parameters.chips.find(device)
        sigma = parameters.unseen_sigma if row < 0 else float(parameters.sigma[row])
        sigma = math.hypot(sigma, _UNMEASURED) if foreign else sigma
        measured = fused & ~backward & (calls["causal"] == 1) & (calls["q_len"] == calls["kv_len"])
        factor = _measure_factor_outside(calls, parameters.limits[row]) if row >= 0 else np.ones(len(calls))
        factor = np.where(measured, factor, 1.0)  # of other kinds nothing was measured, whatever their sizes
        measured &= factor <= 1.0
        open_ = fused & ~backward & (calls["causal"] == 0)
        spread = np.where(measured, sigma, np.hypot(sigma, np.where(open_, _UNMASKED, _UNMEASURED)))
        # another chip of the generation is known as well as its forward is
        spread = np.where(known_backward, np.hypot(parameters.backward_sigma[kernel], sigma), spread)
        new_gpu = np.full(len(calls), row < 0)
        return Estimate(seconds, spread, measured & ~new_gpu, factor, new_gpu)


def _measure_factor_outside(calls: Calls, limits: FloatArray) -> FloatArray:
    """How many times the farthest size of a call is beyond those of fitted ones; 1 inside."""
    shortest, longest, narrow, wide, most = limits
    length, dim = np.maximum(calls["q_len"], 1.0), np.maximum(calls["head_dim"], 1.0)
    ratios = (shortest / length, length / longest, narrow / dim, dim / wide, count_query_elements(calls) / most)
    return np.asarray(np.maximum(np.max(ratios, axis=0), 1.0))


def _estimate_plain_seconds(calls: Calls, device: Device) -> FloatArray:
    """The memory-efficient kernel, with or without tensor cores for the type: GEMMs at a share of the peak. Its blocks
    take whole tiles of queries, keys and the head."""
    dim = calls["head_dim"]
    wide = np.where(dim > _TILE, 2.0 * _TILE, _TILE)  # of keys, and of the head as far as registers hold it
    queries, keys = np.ceil(calls["q_len"] / _TILE) * _TILE, np.ceil(calls["kv_len"] / wide) * wide
    half_keys = 0.5 + 0.5 * wide / np.maximum(keys, wide)  # of a causal mask: tiles on the diagonal are whole
    causal = np.where(calls["causal"] > 0, np.minimum(half_keys, 1.0), 1.0)
    products = 4.0 * calls["batch"] * calls["q_heads"] * queries * keys * np.maximum(dim, wide) * causal
    moved = calls["batch"] * dim * calls.item_bytes()
    moved = 2.0 * moved * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    plain = _PLAIN_SHARE * device.get_sustained_flops("fp32")
    if device.is_capability_at_least(AMPERE):
        plain = _THREE_TF32_SHARE * device.get_sustained_flops("tf32")
    half = {
        name: _EFFICIENT_SHARE * device.get_sustained_flops(name) for name in FUSED_TYPES if name in device.peak_flops
    }
    return np.asarray(8e-6 + products / calls.per_compute(half, plain) + moved / device.dram_bandwidth)
