"""Fused attention: tiles of queries walk over the keys, so time is products, exponentials and one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from traincast.kernels.call import Calls, Estimate, Family, FloatArray
from traincast.kernels.families import ATTENTION
from traincast.kernels.models.base import KernelModel, Measurements, State
from traincast.kernels.models.chips import Chips
from traincast.kernels.models.solve import relative_fit
from traincast.platform.device import Device

_TILE = 128.0  # queries of a block, and keys of a step
_HEAD_DIMS = np.log2([64.0, 128.0, 192.0, 256.0, 512.0])
_FUSED_TYPES = ("fp16", "bf16")
_BACKWARD = 2.8  # five products where the forward has two, recomputation included, at slightly lower efficiency
_PLAIN_SHARE = 0.45  # of the fp32 peak that the memory-efficient kernel reaches without tensor cores
_UNMEASURED = 0.35


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """Feature weights per device, pooled ones for the others, spreads, and the largest fitted sizes."""

    chips: Chips
    weights: FloatArray
    pooled: FloatArray
    sigma: FloatArray
    unseen_sigma: float
    limits: FloatArray  # least and largest query length, least and largest head dimension

    def state(self) -> State:
        """As arrays."""
        return {
            **self.chips.state(),
            "weights": self.weights,
            "pooled": self.pooled,
            "sigma": self.sigma,
            "unseen_sigma": np.array([self.unseen_sigma]),
            "limits": self.limits,
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> AttentionParameters:
        """Read back from arrays."""
        names = ("weights", "pooled", "sigma", "limits")
        weights, pooled, sigma, limits = (np.asarray(state[name], dtype=np.float64) for name in names)
        unseen = float(state["unseen_sigma"][0])
        return AttentionParameters(Chips.from_state(state), weights, pooled, sigma, unseen, limits)


class AttentionModel(KernelModel):
    """Flash-style attention. Fitted state: `parameters_`. Backward and fp32 are derived, and say so."""

    family: ClassVar[Family] = ATTENTION

    def __init__(self, parameters: AttentionParameters | None = None) -> None:
        self.parameters_ = parameters

    def fit(self, data: Measurements) -> Self:
        """From forward device times in half precision."""
        matrices, weights = [], []
        for index, device in enumerate(data.devices):
            mine = data.device == index
            matrix = attention_features(data.calls.take(mine), device)
            weights.append(relative_fit(matrix, data.seconds[mine], knee=0.1))
            matrices.append((matrix, data.seconds[mine]))
        share = np.concatenate([np.full(len(s), 1.0 / np.sqrt(len(s))) for _, s in matrices])
        stacked, seconds = (np.concatenate(part) for part in zip(*matrices, strict=True))
        pooled = relative_fit(stacked, seconds, weight=share, knee=0.1)
        length, dim = data.calls["q_len"], data.calls["head_dim"]
        limits = np.array([length.min(), length.max(), dim.min(), dim.max()])
        size = len(data.devices)
        self.parameters_ = AttentionParameters(
            Chips.of(data.devices), np.array(weights), pooled, np.full(size, 0.15), 0.4, limits
        )
        return self

    def with_spread(self, sigma: FloatArray, unseen_sigma: float) -> Self:
        """The same model with these spreads."""
        assert self.parameters_ is not None, "the model has not been fitted"
        return type(self)(replace(self.parameters_, sigma=sigma, unseen_sigma=unseen_sigma))

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        assert self.parameters_ is not None, "the model has not been fitted"
        parameters = self.parameters_
        row = parameters.chips.find(device)
        weights = parameters.pooled if row < 0 else parameters.weights[row]
        fused = calls.is_compute(*[name for name in _FUSED_TYPES if name in device.peak_flops])
        seconds = attention_features(calls, device) @ weights
        if not fused.all():
            seconds = np.where(fused, seconds, _plain_seconds(calls, device))
        backward = calls.is_kind("backward")
        seconds = np.where(backward, _BACKWARD, 1.0) * seconds
        sigma = np.full(len(calls), parameters.unseen_sigma if row < 0 else float(parameters.sigma[row]))
        measured = fused & ~backward & (calls["causal"] == 1) & (calls["q_len"] == calls["kv_len"])
        low, high, narrow, wide = parameters.limits
        within = (calls["q_len"] >= low) & (calls["q_len"] <= high)
        within &= (calls["head_dim"] >= narrow) & (calls["head_dim"] <= wide)
        return Estimate(
            seconds, np.where(measured, sigma, np.hypot(sigma, _UNMEASURED)), measured & within & (row >= 0)
        )

    def state(self) -> State:
        """The fitted parameters."""
        assert self.parameters_ is not None, "the model has not been fitted"
        return self.parameters_.state()

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these parameters."""
        return cls(AttentionParameters.from_state(state))


def attention_features(calls: Calls, device: Device) -> FloatArray:
    """Seconds-like features: start, products by head dimension, the longest block, memory, waves, exponentials."""
    batch, heads, queries, keys = calls["batch"], calls["q_heads"], calls["q_len"], calls["kv_len"]
    dim, causal = calls["head_dim"], calls["causal"] > 0
    clock = 1e6 * device.effective_clock_mhz
    rate = calls.per_compute({name: device.sustained(name) for name in _FUSED_TYPES}, device.sustained("fp16"))
    per_sm = rate / device.num_sms
    blocks = batch * heads * np.ceil(queries / _TILE)
    padded = np.ceil(keys / _TILE) * _TILE
    seen = np.where(causal, 0.5 * (padded + _TILE), padded)  # keys that an average block of queries looks at
    products = np.maximum(blocks / device.num_sms, 1.0) * 4.0 * _TILE * dim * seen / per_sm
    longest = 4.0 * _TILE * dim * padded / per_sm
    moved = 2.0 * dim * (batch * heads * queries + batch * calls["kv_heads"] * keys) * calls.item_bytes()
    waves = np.ceil(blocks / device.num_sms)
    steps = waves * np.ceil(seen / _TILE)
    columns = [np.full(len(calls), 1e-6), *_by_head_dim(products, dim)]
    columns += [longest, moved / device.dram_bandwidth, 1e3 * waves / clock, 1e3 * steps / clock]
    return np.stack(columns, axis=1)


def _by_head_dim(products: FloatArray, dim: FloatArray) -> list[FloatArray]:
    place = np.clip(np.log2(dim), _HEAD_DIMS[0], _HEAD_DIMS[-1])
    corners = np.eye(len(_HEAD_DIMS))
    return [products * np.interp(place, _HEAD_DIMS, corner) for corner in corners]


def _plain_seconds(calls: Calls, device: Device) -> FloatArray:
    """The memory-efficient kernel in a type without tensor cores: products at a share of the peak."""
    causal = np.where(calls["causal"] > 0, 0.5, 1.0)
    products = 4.0 * calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * calls["head_dim"] * causal
    moved = calls["batch"] * calls["head_dim"] * calls.item_bytes()
    moved = 2.0 * moved * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    return np.asarray(8e-6 + products / (_PLAIN_SHARE * device.sustained("fp32")) + moved / device.dram_bandwidth)
