"""Fitting a row-wise kernel: coefficients of the features per device, pooled ones for the rest, and a residual map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.model import State
from traincast.costs.kernels.rowwise.features import Features, stream_seconds
from traincast.costs.kernels.streaming.memory import START_SECONDS
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

ROW_STEP, COL_STEP = 1.0, 0.5  # of the residual map, in octaves
ROW_KNOTS, COL_KNOTS = 23, 29  # up to 2**22 rows and 2**14 columns, what was measured
LEAST_TRAFFIC = 1.8  # one read and one write, on a card that does better than its kind


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
        seconds = START_SECONDS + LEAST_TRAFFIC * stream_seconds(device, rows, cols, item)
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


def knot_weights(values: FloatArray, step: float, knots: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """The knot below each value, `step` octaves apart, and how far towards the next one the value lies."""
    place = np.clip(np.log2(np.maximum(values, 1.0)) / step, 0.0, knots - 1.001)
    low = place.astype(np.int64)
    return low, place - low


def _interpolate(table: FloatArray, rows: FloatArray, cols: FloatArray) -> FloatArray:
    i, u = knot_weights(rows, ROW_STEP, ROW_KNOTS)
    j, v = knot_weights(cols, COL_STEP, COL_KNOTS)
    flat, stride = table.ravel(), table.shape[1]
    corner = i * stride + j
    lower = flat[corner] * (1 - v) + flat[corner + 1] * v
    upper = flat[corner + stride] * (1 - v) + flat[corner + stride + 1] * v
    return np.asarray(lower * (1 - u) + upper * u)
