"""Fused attention: physical features of the kernel, weighted by a fit per device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.call import Calls, Estimate, Family
from traincast.kernels.families import ATTENTION
from traincast.kernels.models.attention_physics import (
    FEATURES,
    FUSED_TYPES,
    KERNEL_NAMES,
    cache_features,
    kernel_features,
    kernel_of,
)
from traincast.kernels.models.base import KernelModel, Measurements, State
from traincast.kernels.models.chips import Chips
from traincast.kernels.models.solve import relative_fit
from traincast.platform.device import Device

_BACKWARD = 2.8  # five products where the forward has two, recomputation included, at slightly lower efficiency
_PLAIN_SHARE = 0.45  # of the fp32 peak that the memory-efficient kernel reaches without tensor cores
_UNMEASURED = 0.35
_SAME_KERNEL = 16.0  # how much more a device with the same kernel says about one never measured
_TOWARDS_POOL = 0.1  # decides only what a device's own rows leave open, such as head dimensions it lacks
_KNEE = 0.1


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """Feature weights per device (those of the cache copy last), pooled ones per kernel, spreads, fitted sizes."""

    chips: Chips
    weights: FloatArray
    pooled: FloatArray  # a row for each of `KERNEL_NAMES`
    sigma: FloatArray
    unseen_sigma: float
    limits: FloatArray  # per device: least and largest query length and head dimension, most elements of the query

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

    def weights_on(self, device: Device) -> FloatArray:
        """Weights of the device, of its chip, or of its kernel on other devices."""
        row = self.chips.find(device)
        return np.asarray(self.pooled[KERNEL_NAMES.index(kernel_of(device))] if row < 0 else self.weights[row])


class AttentionModel(KernelModel):
    """Flash-style attention. Fitted state: `parameters_`. Backward and fp32 are derived, and say so."""

    family: ClassVar[Family] = ATTENTION

    def __init__(self, parameters: AttentionParameters | None = None) -> None:
        self.parameters_ = parameters

    def fit(self, data: Measurements) -> Self:
        """From forward device times in half precision, the copy into a server's cache included."""
        parts, limits = [], []
        for index, device in enumerate(data.devices):
            mine = data.device == index
            calls = data.calls.take(mine)
            parts.append((_features(calls, device), data.seconds[mine]))
            length, dim = calls["q_len"], calls["head_dim"]
            limits.append([length.min(), length.max(), dim.min(), dim.max(), _query_elements(calls).max()])
        kernels = [kernel_of(device) for device in data.devices]
        pooled = {name: _pooled(parts, [kernel == name for kernel in kernels]) for name in KERNEL_NAMES}
        weights = [_towards(pooled[name], *part) for name, part in zip(kernels, parts, strict=True)]
        size = len(data.devices)
        self.parameters_ = AttentionParameters(
            Chips.of(data.devices), np.array(weights), np.array(list(pooled.values())), np.full(size, 0.15), 0.4,
            np.array(limits),
        )  # fmt: skip
        return self

    def with_spread(self, sigma: FloatArray, unseen_sigma: float) -> Self:
        """The same model with these spreads."""
        assert self.parameters_ is not None, "the model has not been fitted"
        return type(self)(replace(self.parameters_, sigma=sigma, unseen_sigma=unseen_sigma))

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        assert self.parameters_ is not None, "the model has not been fitted"
        parameters = self.parameters_
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
        assert self.parameters_ is not None, "the model has not been fitted"
        estimate = self.predict(calls, device)
        copy = cache_features(calls, device) @ self.parameters_.weights_on(device)[len(FEATURES) :]
        return replace(estimate, seconds=estimate.seconds + copy)

    def state(self) -> State:
        """The fitted parameters."""
        assert self.parameters_ is not None, "the model has not been fitted"
        return self.parameters_.state()

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with these parameters."""
        return cls(AttentionParameters.from_state(state))


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


def _query_elements(calls: Calls) -> FloatArray:
    return calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["head_dim"]


def _within(calls: Calls, limits: FloatArray) -> BoolArray:
    """Which calls have the sizes of fitted ones."""
    shortest, longest, narrow, wide, most = limits
    length, dim = calls["q_len"], calls["head_dim"]
    return np.asarray(
        (length >= shortest) & (length <= longest) & (dim >= narrow) & (dim <= wide) & (_query_elements(calls) <= most)
    )


def _plain_seconds(calls: Calls, device: Device) -> FloatArray:
    """The memory-efficient kernel in a type without tensor cores: products at a share of the peak."""
    causal = np.where(calls["causal"] > 0, 0.5, 1.0)
    products = 4.0 * calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * calls["head_dim"] * causal
    moved = calls["batch"] * calls["head_dim"] * calls.item_bytes()
    moved = 2.0 * moved * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    return np.asarray(8e-6 + products / (_PLAIN_SHARE * device.sustained("fp32")) + moved / device.dram_bandwidth)
