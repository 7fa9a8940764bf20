"""Fits fused attention to the prefill measurements of serving frameworks, and its backward to training runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from traincast.costs.kernels.attention.model import AttentionModel, AttentionParameters
from traincast.costs.kernels.attention.physics import (
    BACKWARD_FEATURES,
    FEATURES,
    KERNEL_NAMES,
    choose_attention_kernel,
    compute_attention_backward_features,
    compute_attention_features,
    compute_cache_features,
    count_query_elements,
)
from traincast.costs.kernels.contract import Calls, Chips, Estimate
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast_evaluation.kernels import efficiency
from traincast_evaluation.kernels.attention.measurements import (
    FILE,
    FRAMEWORK,
    POINTWISE,
    POINTWISE_SOURCE,
    AttentionSamples,
    read_attention,
    read_pointwise,
    read_trained,
)
from traincast_evaluation.kernels.fit import ModelTraining, Predictor, compute_device_spreads, compute_unseen_spread
from traincast_evaluation.kernels.samples import Measurements
from traincast_evaluation.measured_tables import (
    select_held_out,
)
from traincast_evaluation.solve import compute_spread_90, fit_relative

_SAME_KERNEL = 16.0  # how much more a device with the same kernel says about one never measured
_TOWARDS_POOL = 0.1  # decides only what a device's own rows leave open, such as head dimensions it lacks
_ANY_SPREAD = 0.4  # log-sigma of what was not measured
_KNEE = 0.1  # relative error beyond which a sample counts linearly (Huber); set by hand


def fit_attention(data: Measurements) -> AttentionModel:
    """The model of forward device times in half precision, the copy into a server's cache included. Deterministic."""
    return AttentionModel(fit_weights(data))


def predict_as_served(model: AttentionModel) -> Predictor:
    """As a server times forward calls: with the copy of keys and values into its cache, which training lacks."""

    def predict(calls: Calls, device: Device) -> Estimate:
        estimate = model.predict(calls, device)
        copy = compute_cache_features(calls, device) @ model.parameters_.weights_on(device)[len(FEATURES) :]
        return replace(estimate, seconds=estimate.seconds + copy)

    return predict


def fit_weights(data: Measurements) -> AttentionParameters:
    """Weights per device and per kernel, from forward device times. Spreads are placeholders."""
    parts, limits = [], []
    for index, device in enumerate(data.devices):
        mine = data.device == index
        calls = data.calls.take(mine)
        parts.append((_features(calls, device), data.seconds[mine]))
        length, dim = calls["q_len"], calls["head_dim"]
        limits.append([length.min(), length.max(), dim.min(), dim.max(), count_query_elements(calls).max()])
    kernels = [choose_attention_kernel(device) for device in data.devices]
    pooled = {name: _pooled(parts, [kernel == name for kernel in kernels]) for name in KERNEL_NAMES}
    weights = [_towards(pooled[name], *part) for name, part in zip(kernels, parts, strict=True)]
    size = len(data.devices)
    return AttentionParameters(
        Chips.of(data.devices), np.array(weights), np.array(list(pooled.values())), np.full(size, 0.15), _ANY_SPREAD,
        np.array(limits),
        np.zeros((len(KERNEL_NAMES), len(BACKWARD_FEATURES))), np.full(len(KERNEL_NAMES), _ANY_SPREAD),
    )  # fmt: skip


def _features(calls: Calls, device: Device) -> FloatArray:
    return np.concatenate([compute_attention_features(calls, device), compute_cache_features(calls, device)], axis=1)


def _pooled(parts: list[tuple[FloatArray, FloatArray]], same: list[bool]) -> FloatArray:
    """One set of weights for all devices; each counts alike, those with the `same` kernel more."""
    matrix, seconds = (np.concatenate(part) for part in zip(*parts, strict=True))
    share = [np.sqrt((_SAME_KERNEL if s else 1.0) / len(p)) for s, (_, p) in zip(same, parts, strict=True)]
    return fit_relative(matrix, seconds, weight=np.repeat(share, [len(p) for _, p in parts]), knee=_KNEE)


def _towards(pooled: FloatArray, matrix: FloatArray, seconds: FloatArray) -> FloatArray:
    """Weights that fit these rows; what they leave open stays near the `pooled` weights."""
    known = np.flatnonzero(pooled > 0)
    prior = np.zeros((len(known), len(pooled)))
    prior[np.arange(len(known)), known] = 1.0 / pooled[known]
    weight = np.concatenate([np.ones(len(seconds)), np.full(len(known), np.sqrt(_TOWARDS_POOL))])
    rows, target = np.concatenate([matrix, prior]), np.concatenate([seconds, np.ones(len(known))])
    return fit_relative(rows, target, weight=weight, knee=_KNEE)


def with_backward(model: AttentionModel, data: Path) -> AttentionModel:
    """The model with a backward of every measured kernel, fitted to the rows that are not held out, and its spread on
    them."""
    weights = np.zeros((len(KERNEL_NAMES), len(BACKWARD_FEATURES)))
    sigma = np.full(len(KERNEL_NAMES), _ANY_SPREAD)
    for samples in (read_trained(data), read_pointwise(data)):
        seen = samples.take(samples.calls.is_kind("backward") & ~samples.held_out)
        kernel = KERNEL_NAMES.index(choose_attention_kernel(seen.devices[0]))
        features = compute_attention_backward_features(seen.calls, seen.devices[0])
        weights[kernel] = fit_relative(features, seen.seconds)
        sigma[kernel] = compute_spread_90(features @ weights[kernel], seen.seconds)
    return AttentionModel(replace(model.parameters_, backward=weights, backward_sigma=sigma))


class AttentionTraining(ModelTraining[AttentionSamples, AttentionModel]):
    """Weights of the kernel's features, as a server's calls show them."""

    profile: ClassVar[str] = "attention"
    sources: ClassVar[tuple[str, ...]] = (
        "ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0)",
        efficiency.SOURCE,
        POINTWISE_SOURCE,
    )
    files: ClassVar[tuple[str, ...]] = (FILE, efficiency.FILE, POINTWISE)

    def read(self, data: Path) -> AttentionSamples:
        """The rows of one framework, prefill only."""
        return read_attention(data)

    def fit(self, samples: AttentionSamples) -> AttentionModel:
        """The model of these samples."""
        return fit_attention(samples.measurements())

    def predictor(self, fitted: AttentionModel) -> Predictor:
        """As a server times calls."""
        return predict_as_served(fitted)

    def calibrate(self, fitted: AttentionModel, samples: AttentionSamples, seen: BoolArray) -> AttentionModel:
        """Spreads from a fifth of the seen shapes, and from chips left out."""
        calls = samples.calls
        left_out = seen & select_held_out(calls["head_dim"], calls["batch"], calls["q_len"], calls["q_heads"])
        trial = self.predictor(self.fit(samples.take(seen & ~left_out)))
        sigma = compute_device_spreads(samples, left_out, trial, fitted.parameters_.chips.keys)
        unseen = compute_unseen_spread(samples, seen, seen, lambda others: self.predictor(self.fit(others)))
        return AttentionModel(replace(fitted.parameters_, sigma=sigma, unseen_sigma=unseen))

    def model(self, fitted: AttentionModel, data: Path) -> AttentionModel:
        """With the backward, from a table of its own."""
        return with_backward(fitted, data)

    def provenance(self, fitted: AttentionModel, samples: AttentionSamples) -> dict[str, Any]:
        """With the framework whose calls were taken."""
        return {**super().provenance(fitted, samples), "framework": FRAMEWORK}


TRAINING = AttentionTraining()
