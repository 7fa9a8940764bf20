"""Fitting a row-wise kernel: coefficients of the features per device, pooled ones for the rest, and a residual map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.arrays import FloatArray
from traincast.kernels.models.base import Measurements, State
from traincast.kernels.models.chips import Chips
from traincast.kernels.models.memory import START_SECONDS
from traincast.kernels.models.rows_basis import stream_seconds
from traincast.kernels.models.solve import relative_fit
from traincast.platform.device import Device

Features = Callable[[Device, FloatArray, FloatArray, FloatArray], FloatArray]

_ROW_STEP, _COL_STEP = 1.0, 0.5  # of the residual map, in octaves
_ROW_KNOTS, _COL_KNOTS = 23, 29
_SMOOTH, _SHRINK = 0.3, 0.01
_MOST_RESIDUAL = 0.5
_LEAST_TRAFFIC = 1.8  # one read and one write, on a card that does better than its kind


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Fitted state: feature coefficients and a residual map per device, pooled coefficients, spreads, limits.

    `maps[d, i, j]` is the log of measured over modelled time near 2**i rows and 2**(j/2) columns.
    """

    chips: Chips
    coefficients: FloatArray
    pooled: FloatArray
    maps: FloatArray
    sigma: FloatArray
    unseen_sigma: float
    cols_range: tuple[float, float]

    def seconds(
        self, features: Features, device: Device, rows: FloatArray, cols: FloatArray, item: FloatArray
    ) -> tuple[FloatArray, bool, float]:
        """Device seconds, whether the chip was measured, and the spread that goes with it."""
        row = self.chips.find(device)
        weights = self.pooled if row < 0 else self.coefficients[row]
        seconds = START_SECONDS + _LEAST_TRAFFIC * stream_seconds(device, rows, cols, item)
        seconds = seconds + features(device, rows, cols, item) @ weights
        if row < 0:
            return seconds, False, self.unseen_sigma
        return seconds * np.exp(_interpolate(self.maps[row], rows, cols)), True, float(self.sigma[row])

    def with_spread(self, sigma: FloatArray, unseen_sigma: float) -> RowParameters:
        """The same parameters with these spreads."""
        return replace(self, sigma=sigma, unseen_sigma=unseen_sigma)

    def state(self) -> State:
        """As arrays; the maps in half the room, they are corrections of a few percent."""
        return {
            **self.chips.state(),
            "coefficients": self.coefficients,
            "pooled": self.pooled,
            "maps": self.maps.astype(np.float32),
            "sigma": self.sigma,
            "scalars": np.array([self.unseen_sigma, *self.cols_range]),
        }

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]]) -> RowParameters:
        """Read back from arrays."""
        unseen, low, high = (float(value) for value in state["scalars"])
        arrays = {
            name: np.asarray(state[name], dtype=np.float64) for name in ("coefficients", "pooled", "maps", "sigma")
        }
        return RowParameters(chips=Chips.from_state(state), unseen_sigma=unseen, cols_range=(low, high), **arrays)


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
        mine_base = _LEAST_TRAFFIC * stream_seconds(device, rows[mine], cols[mine], item[mine])
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
    in_flight = 4.0 * device.num_sms * 4 * cols  # at least four blocks an SM
    traffic = 2.0 + (passes - 1.0) * np.clip(in_flight / device.l2_bytes, 0.0, 1.0)
    stream = stream_seconds(device, rows, cols, item)
    return features(device, rows, cols, item), traffic * stream, _LEAST_TRAFFIC * stream


def _weights(values: FloatArray, step: float, knots: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
    place = np.clip(np.log2(np.maximum(values, 1.0)) / step, 0.0, knots - 1.001)
    low = place.astype(np.int64)
    return low, place - low


def _interpolate(table: FloatArray, rows: FloatArray, cols: FloatArray) -> FloatArray:
    i, u = _weights(rows, _ROW_STEP, _ROW_KNOTS)
    j, v = _weights(cols, _COL_STEP, _COL_KNOTS)
    flat, stride = table.ravel(), table.shape[1]
    corner = i * stride + j
    lower = flat[corner] * (1 - v) + flat[corner + 1] * v
    upper = flat[corner + stride] * (1 - v) + flat[corner + stride + 1] * v
    return np.asarray(lower * (1 - u) + upper * u)


def _residual_map(rows: FloatArray, cols: FloatArray, residual: FloatArray) -> FloatArray:
    """A smooth map through the residuals: least squares on a grid, neighbours tied, pulled to zero without data."""
    size = _ROW_KNOTS * _COL_KNOTS
    i, u = _weights(rows, _ROW_STEP, _ROW_KNOTS)
    j, v = _weights(cols, _COL_STEP, _COL_KNOTS)
    basis = np.zeros((len(rows), size))
    here = np.arange(len(rows))
    for down, side, weight in ((0, 0, (1 - u) * (1 - v)), (0, 1, (1 - u) * v), (1, 0, u * (1 - v)), (1, 1, u * v)):
        basis[here, (i + down) * _COL_KNOTS + j + side] += weight
    matrix = basis.T @ basis + _SHRINK * np.eye(size)
    index = np.arange(size).reshape(_ROW_KNOTS, _COL_KNOTS)
    for first, second in ((index[:-1], index[1:]), (index[:, :-1], index[:, 1:])):
        a, b = first.ravel(), second.ravel()
        np.add.at(matrix, (a, a), _SMOOTH)
        np.add.at(matrix, (b, b), _SMOOTH)
        np.add.at(matrix, (a, b), -_SMOOTH)
        np.add.at(matrix, (b, a), -_SMOOTH)
    solved = np.linalg.solve(matrix, basis.T @ np.clip(residual, -_MOST_RESIDUAL, _MOST_RESIDUAL))
    bounded = np.clip(solved, -_MOST_RESIDUAL, _MOST_RESIDUAL).reshape(_ROW_KNOTS, _COL_KNOTS)
    return np.asarray(bounded.astype(np.float32), dtype=np.float64)  # as it is kept
