"""Fitting a row-wise kernel: coefficients of the features per device, pooled ones for the rest, and a residual map."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.model import Measurements
from traincast.costs.kernels.rowwise.features import Features, stream_seconds
from traincast.costs.kernels.rowwise.parameters import (
    COL_KNOTS,
    COL_STEP,
    LEAST_TRAFFIC,
    ROW_KNOTS,
    ROW_STEP,
    RowParameters,
    knot_weights,
)
from traincast.costs.kernels.solve import relative_fit
from traincast.costs.kernels.streaming.memory import START_SECONDS
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

_SMOOTH, _SHRINK = 0.3, 0.01  # weight, in samples, of the ties between neighbouring knots and towards zero; set by hand
_MOST_RESIDUAL = 0.5  # log error beyond which a reading is taken for a mistake


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
        mine_base = LEAST_TRAFFIC * stream_seconds(device, rows[mine], cols[mine], item[mine])
        weight = np.concatenate([np.ones(len(seconds)), np.full(len(extra_seconds), 0.3)])
        matrix = np.concatenate([mine_features, extra])
        target = np.concatenate([seconds, extra_seconds])
        base = np.concatenate([mine_base, extra_base])
        solution = relative_fit(matrix, target, base=base, weight=weight)
        tables.append(solution)
        modelled = START_SECONDS + mine_base + mine_features @ solution
        maps.append(_residual_map(rows[mine], cols[mine], np.log(data.seconds[mine] / modelled)))
        matrices.append(matrix)
        targets.append(target)
        bases.append(base)
        weights.append(weight / np.sqrt(len(target)))  # every device counts alike
    stacked = (np.concatenate(part) for part in (matrices, targets, bases, weights))
    all_features, all_seconds, all_base, all_weights = stacked
    pooled = relative_fit(all_features, all_seconds, base=all_base, weight=all_weights, knee=0.1)
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
    stream = stream_seconds(device, rows, cols, item)
    return features(device, rows, cols, item), traffic * stream, LEAST_TRAFFIC * stream


def _residual_map(rows: FloatArray, cols: FloatArray, residual: FloatArray) -> FloatArray:
    """A smooth map through the residuals: least squares on a grid, neighbours tied, pulled to zero without data."""
    size = ROW_KNOTS * COL_KNOTS
    i, u = knot_weights(rows, ROW_STEP, ROW_KNOTS)
    j, v = knot_weights(cols, COL_STEP, COL_KNOTS)
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
