"""Fits convolutions to NeuSight (3x3, fp32, forward) and DeepBench (all directions, fp32 and fp16).

NeuSight times one call at a time, and what its stopwatch shows is late by up to 0.3 ms (A100, V100) or 0.7 ms (P4,
P100), whatever the size. The delay of a shape is the same share of every machine's longest (rank correlation 0.95
between machines), any share is about equally likely, and no size explains it: it is the host's, not the device's. A
fit therefore finds the share of every shape it may see, from all machines at once; for any other shape the typical
share is all that is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import Calls, Chips
from traincast.costs.kernels.conv.model import (
    FIXED_SECONDS,
    FUSED,
    GEMM_COLUMNS,
    LEAST_TENSOR_CHANNELS,
    NONFUSED,
    TENSOR_TYPES,
    ConvModel,
    ConvParameters,
    ConvTrees,
    compute_algorithm_features,
    compute_own_tree_features,
    compute_shared_tree_features,
    estimate_algorithm_seconds,
    get_conv_flop_rates,
)
from traincast.costs.kernels.conv.physics import Geometry
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IndexArray
from traincast.utils.metrics import compute_mean_error_percent
from traincast_evaluation.kernels.conv.boosting import boost
from traincast_evaluation.kernels.conv.measurements import DEEPBENCH_FILE, NEUSIGHT_FILE, ConvSamples, read_convolutions
from traincast_evaluation.kernels.fit import ModelTraining, Predictor, compute_unseen_spread
from traincast_evaluation.kernels.samples import Measurements
from traincast_evaluation.measured_tables import select_held_out
from traincast_evaluation.solve import compute_spread_90, fit_relative

# set by hand: they only say which way is fastest in the first round
_START = np.array([1.5, 1.0, 0.6, 2.0, 1.2, 0.6, 2.0, 1.0, 1.2, 1.35, 0.6, 3.0, 1.1, 2.0, 3.0, 5.0])
_MODEL_ERROR = 0.05  # what the physics misses even of a perfect reading, relative
_ROUNDS = 8  # of giving samples to ways and refitting; set by hand
_TIE = 0.002  # how strongly a device is tied to the pooled weights, against its own rows
_SHORTEST_KERNEL_SECONDS = 10e-6  # in the quickest rows, which show a device's least host part
_SHORT = 0.3  # of a device's median time: rows that show the delay best
_SHARE_VARIANCE = 1 / 12  # of a share anywhere between none and all
_COMMON_ERROR = 0.08  # log-sigma of the physics for a shape on all devices, and on one
_OWN_ERROR = 0.08  # as above; both set by hand
_JITTER_SECONDS = 15e-6  # of a host's delay; assumed
_SURE_VARIANCE = 0.002  # of the shares that tell the typical one
_DELAY_ROUNDS = 3  # of shares and weights found in turn; set by hand
_ENOUGH_SAMPLES = 100  # of a device, for a spread of its own
_LEAST_SPREAD = 0.05  # log-sigma: what the physics alone is good to, see `conv.fitting`


def fit_conv(data: Measurements) -> ConvModel:
    """The model of device times of any kinds and compute types. Deterministic."""
    parameters = fit_weights(data)
    tensor = data.calls.is_compute(*TENSOR_TYPES) & (data.calls["in_channels"] >= LEAST_TENSOR_CHANNELS)
    return ConvModel(parameters, fit_trees(parameters, data, tensor))


def fit_weights(data: Measurements) -> ConvParameters:
    """Weights by alternating: give every row to its fastest way, refit the ways to their rows."""
    tensor_row = data.calls.is_compute(*TENSOR_TYPES)
    plain_pool = _pooled(data, ~tensor_row, _START)
    tensor_pool = _pooled(data, tensor_row, plain_pool) if tensor_row.any() else plain_pool
    plain, tensor = [], []
    for index in range(len(data.devices)):
        mine = data.device == index
        plain.append(_refined(data, mine & ~tensor_row, plain_pool))
        tensor.append(_refined(data, mine & tensor_row, tensor_pool))
    size = len(data.devices)
    g = Geometry.of(data.calls)
    limits = np.array([part.max() for part in (g.batch, g.channels, g.filters, g.height)])
    spread = np.full(size, 0.15)  # a placeholder, as 0.3 for other chips: `fit` sets both
    return ConvParameters(
        Chips.of(data.devices), np.array(plain), np.array(tensor), plain_pool, tensor_pool, spread, 0.3, limits
    )


def weigh_certainty(data: Measurements) -> FloatArray:
    """Weight of a row's relative error: the model itself is good to some 5 %."""
    noise = np.broadcast_to(np.asarray(data.noise_seconds, dtype=np.float64), data.seconds.shape)
    return np.asarray(1.0 / np.hypot(_MODEL_ERROR, noise / data.seconds))


def _pooled(data: Measurements, use: BoolArray, start: FloatArray) -> FloatArray:
    """Weights shared by all devices, every device counting alike."""
    groups = [np.flatnonzero(use & (data.device == i)) for i in range(len(data.devices))]
    groups = [rows for rows in groups if len(rows)]
    order = np.concatenate(groups)
    share = np.concatenate([np.full(len(rows), 1.0 / np.sqrt(len(rows))) for rows in groups])
    return _alternate(data, order, share, start, tie=0.0)


def _refined(data: Measurements, use: BoolArray, pooled: FloatArray) -> FloatArray:
    rows = np.flatnonzero(use)
    return _alternate(data, rows, np.ones(len(rows)), pooled, tie=_TIE) if len(rows) else pooled


def _alternate(
    data: Measurements, rows: npt.NDArray[np.intp], share: FloatArray, start: FloatArray, tie: float
) -> FloatArray:
    calls, seconds = data.calls.take(rows), data.seconds[rows]
    g = Geometry.of(calls)
    parts = [np.zeros((len(rows), width)) for width in (3, 3, 4)]
    for index in np.unique(data.device[rows]):
        mine = data.device[rows] == index
        some, device = calls.take(mine), data.devices[int(index)]
        rate = get_conv_flop_rates(some, device, some.is_compute(*TENSOR_TYPES))
        for part, block in zip(parts, compute_algorithm_features(some, Geometry.of(some), device, rate), strict=True):
            part[mine] = block
    sure = share * weigh_certainty(data)[rows]
    weights = start.copy()
    for _ in range(_ROUNDS):
        way = _fastest(calls, g, parts, weights)
        jobs = [(way == 0) & calls.is_kind(kind) for kind in GEMM_COLUMNS] + [way == 1, way == 2]
        columns = [*GEMM_COLUMNS.values(), FUSED, NONFUSED]
        blocks = [parts[0]] * 3 + [parts[1], parts[2]]
        fixed = [0.0] * 3 + list(FIXED_SECONDS)
        for job, column, block, constant in zip(jobs, columns, blocks, fixed, strict=True):
            if job.sum() >= 20:
                weights[column] = _tied_fit(block[job], seconds[job], sure[job], constant, start[column], tie)
    return weights


def _fastest(calls: Calls, g: Geometry, parts: list[FloatArray], weights: FloatArray) -> npt.NDArray[np.int64]:
    direct = np.zeros(len(calls))
    for kind, columns in GEMM_COLUMNS.items():
        mine = calls.is_kind(kind)
        direct[mine] = parts[0][mine] @ weights[columns]
    fused = np.where(g.winograd & ~g.weights, FIXED_SECONDS[0] + parts[1] @ weights[FUSED], np.inf)
    nonfused = np.where(g.winograd | g.winograd5, FIXED_SECONDS[1] + parts[2] @ weights[NONFUSED], np.inf)
    return np.asarray(np.argmin(np.stack([direct, fused, nonfused]), axis=0))


def _tied_fit(
    block: FloatArray, seconds: FloatArray, sure: FloatArray, constant: float, prior: FloatArray, tie: float
) -> FloatArray:
    """Non-negative weights near `prior`: one made-up row per weight, as heavy as `tie` of the real ones."""
    known = np.flatnonzero(prior > 0) if tie else np.zeros(0, dtype=np.intp)
    made_up = np.zeros((len(known), block.shape[1]))
    made_up[np.arange(len(known)), known] = 1.0 / prior[known]
    pull = np.sqrt(tie * float(np.sum(sure**2)))
    return fit_relative(
        np.concatenate([block, made_up]),
        np.concatenate([seconds, np.ones(len(known))]),
        base=np.concatenate([np.full(len(seconds), constant), np.zeros(len(known))]),
        weight=np.concatenate([sure, np.full(len(known), pull)]),
        knee=0.1,
    )


_MOST_RESIDUAL = 1.0  # log error beyond which a reading is taken for a mistake


_ENOUGH_ROWS = 1000  # of 3x3 forward in fp32, for a chip to have trees of its own


def fit_trees(parameters: ConvParameters, data: Measurements, tensor: BoolArray) -> ConvTrees:
    """Trees on what the weights leave over; `tensor` says which rows ran on tensor cores."""
    g = Geometry.of(data.calls)
    plentiful = g.winograd & data.calls.is_kind("forward")
    wanted = weigh_certainty(data)
    trees, devices = [], []
    shared, others, fast = [], [], []
    for index, device in enumerate(data.devices):
        mine = data.device == index
        rows = np.flatnonzero(mine & plentiful)
        if len(rows) >= _ENOUGH_ROWS:
            devices.append(device)
            _, some, seconds = _ways(parameters, data, rows, device, tensor)
            target = _left(data.seconds[rows], seconds)
            trees.append(boost(compute_own_tree_features(some, device, seconds), target, wanted[rows]))
            mine &= ~plentiful
        rows = np.flatnonzero(mine)
        if len(rows):
            calls, some, seconds = _ways(parameters, data, rows, device, tensor)
            others.append(device)
            fast.append(bool(tensor[rows].any()))
            features = compute_shared_tree_features(calls, some, device, seconds)
            shared.append((features, _left(data.seconds[rows], seconds), wanted[rows]))
    matrix, target, weight = (np.concatenate([part[column] for part in shared]) for column in range(3))
    return ConvTrees(Chips.of(devices), tuple(trees), Chips.of(others), np.array(fast), boost(matrix, target, weight))


def _ways(
    parameters: ConvParameters, data: Measurements, rows: npt.NDArray[np.intp], device: Device, tensor: BoolArray
) -> tuple[Calls, Geometry, FloatArray]:
    calls = data.calls.take(rows)
    g = Geometry.of(calls)
    return calls, g, estimate_algorithm_seconds(parameters, calls, g, device, tensor[rows])


def _left(seconds: FloatArray, by_algorithm: FloatArray) -> FloatArray:
    return np.asarray(np.clip(np.log(seconds / by_algorithm.min(axis=1)), -_MOST_RESIDUAL, _MOST_RESIDUAL))


@dataclass(frozen=True, slots=True)
class _Shares:
    """Of every shape: the share of the longest delay, 0 to 1, and its variance."""

    share: FloatArray
    variance: FloatArray


def with_host_parts(samples: ConvSamples, seen: BoolArray) -> ConvSamples:
    """Samples with the host's part of every event-timed reading: found where `seen`, typical elsewhere."""
    timed = np.flatnonzero(samples.event_timed & seen)
    if not len(timed):
        return samples
    physics = ConvModel(fit_weights(samples.take(seen & ~samples.event_timed).measurements()))
    least, longest = _delays(samples, timed, _physical_seconds(physics, samples, timed))
    shape = np.unique(samples.calls.values[timed], axis=0, return_inverse=True)[1].ravel()
    offset, unsure = np.zeros(len(samples.seconds)), np.zeros(len(samples.seconds))
    typical = 0.5
    for round_ in range(_DELAY_ROUNDS + 1):
        device_seconds = _physical_seconds(physics, samples, timed)
        late = samples.seconds[timed] - device_seconds - least[samples.device[timed]]
        estimate = _shares(shape, late, device_seconds, longest[samples.device[timed]], typical)
        sure = estimate.variance < _SURE_VARIANCE
        typical = float(estimate.share[sure].mean()) if sure.any() else typical
        offset[timed] = least[samples.device[timed]] + estimate.share[shape] * longest[samples.device[timed]]
        unsure[timed] = np.hypot(_JITTER_SECONDS, np.sqrt(estimate.variance[shape]) * longest[samples.device[timed]])
        if round_ < _DELAY_ROUNDS:
            physics = ConvModel(fit_weights(replace(samples, offset=offset, unsure=unsure).take(seen).measurements()))
    other = samples.event_timed & ~seen
    offset[other] = (least + typical * longest)[samples.device[other]]
    unsure[other] = np.sqrt(_SHARE_VARIANCE) * longest[samples.device[other]]
    return replace(samples, offset=offset, unsure=unsure)


def _delays(samples: ConvSamples, timed: IndexArray, device_seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least host part and longest delay of every device, in seconds, where `device_seconds` owes nothing to `timed`."""
    least, longest = np.zeros(len(samples.devices)), np.zeros(len(samples.devices))
    for index in np.unique(samples.device[timed]):
        mine = samples.device[timed] == index
        measured, physical = samples.seconds[timed][mine], device_seconds[mine]
        least[index] = max(float(np.quantile(measured, 0.001)) - _SHORTEST_KERNEL_SECONDS, 0.0)
        short = physical <= max(_SHORT * float(np.median(physical)), float(np.quantile(physical, 0.1)))
        left = measured[short] - physical[short] - least[index]
        longest[index] = max(2 * float(np.median(left)), _JITTER_SECONDS)
    return least, longest


def _shares(
    shape: IndexArray, late: FloatArray, device_seconds: FloatArray, longest: FloatArray, typical: float
) -> _Shares:
    """What `late` seconds say of the share, when the physics may be wrong for a shape everywhere, or on a device.

    The result is between what the shape's rows say and the `typical` share, whichever is surer.
    """
    weight = 1 / (np.square(_OWN_ERROR * device_seconds) + _JITTER_SECONDS**2)
    beyond = late - typical * longest

    def total(values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(shape, weight * values), dtype=np.float64)

    share_share = total(longest**2) + 1 / _SHARE_VARIANCE
    error_error = total(device_seconds**2) + 1 / _COMMON_ERROR**2
    cross = total(longest * device_seconds)
    determinant = share_share * error_error - cross**2
    share = (error_error * total(longest * beyond) - cross * total(device_seconds * beyond)) / determinant
    return _Shares(np.clip(typical + share, 0.0, 1.0), error_error / determinant)


def _physical_seconds(model: ConvModel, samples: ConvSamples, chosen: IndexArray) -> FloatArray:
    return samples.take(chosen).kernel_seconds(model.predict)[0]


class ConvTraining(ModelTraining[ConvSamples, ConvModel]):
    """Weights of every way to compute, and trees on what they leave over."""

    profile: ClassVar[str] = "conv"
    sources: ClassVar[tuple[str, ...]] = (
        "sitar-lab/NeuSight @ 6945927d (MIT)",
        "baidu-research/DeepBench @ da81ba78 (Apache-2.0)",
    )
    files: ClassVar[tuple[str, ...]] = (NEUSIGHT_FILE, DEEPBENCH_FILE)

    def read(self, data: Path) -> ConvSamples:
        """All convolutions of both sources."""
        return read_convolutions(data)

    def prepare(self, samples: ConvSamples, seen: BoolArray) -> ConvSamples:
        """With the host's part of event-timed ones."""
        return with_host_parts(samples, seen)

    def fit(self, samples: ConvSamples) -> ConvModel:
        """The model of these samples."""
        return fit_conv(samples.measurements())

    def calibrate(self, fitted: ConvModel, samples: ConvSamples, seen: BoolArray) -> ConvModel:
        """Spreads from a fifth of the seen shapes, whose host parts nobody knows, and from chips left out."""
        calls = samples.calls
        left_out = seen & select_held_out(calls["in_channels"], calls["batch"], calls["out_channels"], calls["in_h"])
        judged = self.prepare(samples, seen & ~left_out)
        trial = self.fit(judged.take(seen & ~left_out))
        sigma = [_spread(trial, judged, left_out, key) for key in fitted.parameters_.chips.keys]
        plain = seen & calls.is_compute("fp32")
        unseen = compute_unseen_spread(samples, seen, plain, physics_predictor)
        return ConvModel(replace(fitted.parameters_, sigma=np.array(sigma), unseen_sigma=unseen), fitted.residual_)

    def provenance(self, fitted: ConvModel, samples: ConvSamples) -> dict[str, Any]:
        """With the errors of either source, and what the host adds on each device."""
        common = super().provenance(fitted, samples)
        del common["mean_error_percent_held_out"]
        held, timed = samples.held_out, samples.event_timed
        shown, _ = samples.predicted(fitted.predict)
        for name, chosen in (("neusight", held & timed), ("deepbench", held & ~timed)):
            error = compute_mean_error_percent(shown[chosen], samples.seconds[chosen])
            common[f"mean_error_percent_held_out_{name}"] = error
        parts = {device.key: held & timed & (samples.device == i) for i, device in enumerate(samples.devices)}
        offsets = {key: round(1e6 * float(samples.offset[mine].mean()), 1) for key, mine in parts.items() if mine.any()}
        return {**common, "host_offset_us": offsets}


TRAINING = ConvTraining()


def physics_predictor(samples: ConvSamples) -> Predictor:
    """What the physics alone says, weighted by these samples: the trees know only the chips they have seen."""
    return ConvModel(fit_weights(samples.measurements())).predict


def _spread(trial: ConvModel, samples: ConvSamples, chosen: BoolArray, key: str) -> float:
    """Log-sigma of a device; one with few samples to judge by shares that of all queue-timed devices."""
    index = [device.key for device in samples.devices].index(key)
    plain = chosen & samples.calls.is_compute("fp32")
    mine = plain & (samples.device == index)
    part = samples.take(mine if mine.sum() >= _ENOUGH_SAMPLES else plain & ~samples.event_timed)
    shown, _ = part.predicted(trial.predict)
    added = np.where(part.event_timed, part.unsure / shown, ConvModel.UNMEASURED)
    return max(compute_spread_90(shown, part.seconds, added), _LEAST_SPREAD)
