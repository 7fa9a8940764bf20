"""Fits softmax and layer norm to the NeuSight vector measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from traincast.costs.kernels.contract import Calls, Chips, Estimate, KernelModel
from traincast.costs.kernels.rowwise.model import (
    COL_KNOTS,
    COL_STEP,
    LEAST_TRAFFIC,
    ROW_KNOTS,
    ROW_STEP,
    NormModel,
    RowParameters,
    SoftmaxModel,
    compute_knot_weights,
)
from traincast.costs.kernels.rowwise.physics import (
    Features,
    compute_layer_norm_features,
    compute_softmax_features,
    estimate_stream_seconds,
)
from traincast.costs.kernels.streaming.physics import START_SECONDS
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast_evaluation.kernels.fit import FamilyTraining, Predictor, compute_device_spreads, compute_unseen_spread
from traincast_evaluation.kernels.samples import Measurements
from traincast_evaluation.kernels.streaming.fit import TRAINING as STREAMS
from traincast_evaluation.kernels.streaming.measurements import FILES, SOURCE, VectorSamples, read_vectors
from traincast_evaluation.measured_tables import select_held_out
from traincast_evaluation.solve import fit_relative

_SMOOTH, _SHRINK = 0.3, 0.01  # weight, in samples, of the ties between neighbouring knots and towards zero; set by hand
_MOST_RESIDUAL = 0.5  # log error beyond which a reading is taken for a mistake
_LONGEST_HIDDEN = 30e-6  # the host is at most this far ahead of the kernel's start when it records the second event
_LEAST_SPREAD = 0.01  # log-sigma: set by hand, the residual map follows single readings closely


def fit_rows(data: Measurements, features: Features, passes: float) -> RowParameters:
    """Coefficients and maps from device times. `passes` is how many row reads the kernel asks for.

    Beyond the widest measured rows the caches overflow for certain; made-up rows whose every pass comes from DRAM
    hold the fit to that, with little weight.
    """
    rows, cols, item = data.calls["rows"], data.calls["cols"], data.calls.item_bytes()
    tables, maps, matrices, targets, bases, weights = [], [], [], [], [], []
    for index, device in enumerate(data.devices):
        mine = data.device == index
        seconds = np.maximum(data.seconds[mine] - START_SECONDS, 0.25 * data.seconds[mine])
        mine_features = features(device, rows[mine], cols[mine], item[mine])
        extra, extra_seconds, extra_base = _asymptote(device, features, passes)
        mine_base = LEAST_TRAFFIC * estimate_stream_seconds(device, rows[mine], cols[mine], item[mine])
        weight = np.concatenate([np.ones(len(seconds)), np.full(len(extra_seconds), 0.3)])
        matrix = np.concatenate([mine_features, extra])
        target = np.concatenate([seconds, extra_seconds])
        base = np.concatenate([mine_base, extra_base])
        solution = fit_relative(matrix, target, base=base, weight=weight)
        tables.append(solution)
        modelled = START_SECONDS + mine_base + mine_features @ solution
        maps.append(_residual_map(rows[mine], cols[mine], np.log(data.seconds[mine] / modelled)))
        matrices.append(matrix)
        targets.append(target)
        bases.append(base)
        weights.append(weight / np.sqrt(len(target)))  # every device counts alike
    stacked = (np.concatenate(part) for part in (matrices, targets, bases, weights))
    all_features, all_seconds, all_base, all_weights = stacked
    pooled = fit_relative(all_features, all_seconds, base=all_base, weight=all_weights, knee=0.1)
    limits = (float(cols.min()), float(cols.max()))
    size = len(data.devices)
    return RowParameters(
        Chips.of(data.devices), np.array(tables), pooled, np.array(maps), np.full(size, 0.05), 0.3, limits
    )


def _asymptote(device: Device, features: Features, passes: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    rows = np.array([4096.0, 8192.0, 16384.0, 32768.0, 65536.0])
    cols = np.array([16384.0, 32768.0, 65536.0, 65536.0, 131072.0])
    item = np.full(len(rows), 4.0)
    in_flight = 4.0 * device.num_sms * 4 * cols  # at least four blocks per SM
    traffic = 2.0 + (passes - 1.0) * np.clip(in_flight / device.l2_bytes, 0.0, 1.0)
    stream = estimate_stream_seconds(device, rows, cols, item)
    return features(device, rows, cols, item), traffic * stream, LEAST_TRAFFIC * stream


def _residual_map(rows: FloatArray, cols: FloatArray, residual: FloatArray) -> FloatArray:
    """A smooth map through the residuals: least squares on a grid, neighbours tied, pulled to zero without data."""
    size = ROW_KNOTS * COL_KNOTS
    i, u = compute_knot_weights(rows, ROW_STEP, ROW_KNOTS)
    j, v = compute_knot_weights(cols, COL_STEP, COL_KNOTS)
    basis = np.zeros((len(rows), size))
    here = np.arange(len(rows))
    for down, side, weight in ((0, 0, (1 - u) * (1 - v)), (0, 1, (1 - u) * v), (1, 0, u * (1 - v)), (1, 1, u * v)):
        basis[here, (i + down) * COL_KNOTS + j + side] += weight
    matrix = basis.T @ basis + _SHRINK * np.eye(size)
    index = np.arange(size).reshape(ROW_KNOTS, COL_KNOTS)
    for first, second in ((index[:-1], index[1:]), (index[:, :-1], index[:, 1:])):
        a, b = first.ravel(), second.ravel()
        np.add.at(matrix, (a, a), _SMOOTH)
        np.add.at(matrix, (b, b), _SMOOTH)
        np.add.at(matrix, (a, b), -_SMOOTH)
        np.add.at(matrix, (b, a), -_SMOOTH)
    solved = np.linalg.solve(matrix, basis.T @ np.clip(residual, -_MOST_RESIDUAL, _MOST_RESIDUAL))
    bounded = np.clip(solved, -_MOST_RESIDUAL, _MOST_RESIDUAL).reshape(ROW_KNOTS, COL_KNOTS)
    return np.asarray(bounded.astype(np.float32), dtype=np.float64)  # as it is kept


class RowTraining(FamilyTraining[VectorSamples, RowParameters]):
    """Forward kernels of `op`, which read a row `passes` times."""

    sources: ClassVar[tuple[str, ...]] = (SOURCE,)
    files: ClassVar[tuple[str, ...]] = FILES
    op: ClassVar[str]
    passes: ClassVar[float]
    features: Features

    def read(self, data: Path) -> VectorSamples:
        """All samples of the op."""
        return read_vectors(data, self.op)

    def prepare(self, samples: VectorSamples, seen: BoolArray) -> VectorSamples:
        """With the host's offset of every device."""
        return with_row_offsets(samples, seen, self.features)

    def fit(self, samples: VectorSamples) -> RowParameters:
        """The parameters of these samples."""
        return fit_rows(samples.measurements(), self.features, self.passes)

    def predictor(self, fitted: RowParameters) -> Predictor:
        """The measured kernel with the spread of its shape alone."""

        def predict(calls: Calls, device: Device) -> Estimate:
            sizes = calls["rows"], calls["cols"], calls.item_bytes()
            seconds, known, sigma = fitted.seconds(self.features, device, *sizes)
            return Estimate(seconds, np.full(len(calls), sigma), np.full(len(calls), known))

        return predict

    def calibrate(self, fitted: RowParameters, samples: VectorSamples, seen: BoolArray) -> RowParameters:
        """Spreads from a fifth of the seen shapes, and from chips left out."""
        telling = samples.telling
        left_out = seen & select_held_out(samples.cols, samples.rows)  # another fifth: the hash depends on the order
        trial = self.predictor(self.fit(samples.take(seen & ~left_out & telling)))
        sigma = compute_device_spreads(samples, left_out & telling, trial, fitted.chips.keys, _LEAST_SPREAD)
        use = seen & telling
        unseen = compute_unseen_spread(samples, use, use, lambda others: self.predictor(self.fit(others)))
        return replace(fitted, sigma=sigma, unseen_sigma=unseen)


class SoftmaxTraining(RowTraining):
    """Softmax: a maximum, a sum and the quotients read a row three times."""

    profile: ClassVar[str] = "softmax"
    op: ClassVar[str] = "softmax"
    passes: ClassVar[float] = 3.0
    features = staticmethod(compute_softmax_features)

    def model(self, fitted: RowParameters, data: Path) -> KernelModel:
        """Softmax."""
        return SoftmaxModel(fitted)


class NormTraining(RowTraining):
    """Layer norm: moments and quotients read a row twice."""

    profile: ClassVar[str] = "norm"
    op: ClassVar[str] = "ln"
    passes: ClassVar[float] = 2.0
    features = staticmethod(compute_layer_norm_features)

    def model(self, fitted: RowParameters, data: Path) -> KernelModel:
        """Layer norm, with the memory system for batch norm."""
        samples = STREAMS.read(data)
        seen = ~samples.held_out
        samples = STREAMS.prepare(samples, seen)
        return NormModel(fitted, STREAMS.fit(samples.take(seen & samples.telling)).parameters_)


SOFTMAX_TRAINING, NORM_TRAINING = SoftmaxTraining(), NormTraining()


def with_row_offsets(samples: VectorSamples, seen: BoolArray, features: Features) -> VectorSamples:
    """Samples with the host's offset of every device: the constant that the features leave over."""
    offset = np.zeros(len(samples))
    for index, device in enumerate(samples.devices):
        mine = samples.device == index
        use = mine & seen & samples.telling
        if not (use & (samples.floor > 0)).any():
            continue
        item = np.full(int(use.sum()), 4.0)
        matrix = features(device, samples.rows[use], samples.cols[use], item)
        matrix = np.concatenate([np.full((len(matrix), 1), 1e-5), matrix], axis=1)
        constant = 1e-5 * fit_relative(matrix, samples.seconds[use])[0] - START_SECONDS
        floor = float(samples.floor[mine].max())
        offset[mine] = np.clip(constant, max(floor - _LONGEST_HIDDEN, 0.0), floor)
    return replace(samples, offset=offset)
