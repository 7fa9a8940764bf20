"""Accuracy reported one way: n, GMAE, MAPE, median, worst, signed bias; the quantile of 90 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError

Z90 = 1.645
"""Standard normal quantile of a two-sided 90 % interval: 5 % of a normal distribution are above it."""


_SMALLEST = 1e-4  # relative errors below 0.01 % would let one lucky hit pull a geometric mean to nothing


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One line of an accuracy table. Errors are percent of the measured value.

    `gmae` is the geometric mean of absolute errors, `bias` the mean signed error, `worst_case` the name of the
    point with the largest error and `worst` that error with its sign. `reference` is what others score, as text,
    `covered` the percentage of measurements inside the 90 % interval, and `half_width` the median of half that
    interval, percent of the prediction; None where none was given.
    """

    suite: str
    group: str
    n: int
    gmae: float
    mape: float
    median: float
    worst: float
    worst_case: str
    bias: float
    reference: str = ""
    covered: float | None = None
    half_width: float | None = None


def compute_error_row(
    suite: str,
    group: str,
    predicted: npt.ArrayLike,
    measured: npt.ArrayLike,
    names: Sequence[str] | None = None,
    reference: str = "",
    inside: BoolArray | None = None,
    half_widths: FloatArray | None = None,
) -> ErrorRow:
    """The accuracy of predictions against measurements that took no part in fitting; `inside` says of each whether
    it is in its 90 % interval, `half_widths` how wide that is (see `compute_half_widths`)."""
    p = np.asarray(predicted, dtype=np.float64)
    m = np.asarray(measured, dtype=np.float64)
    if p.shape != m.shape or p.ndim != 1:
        raise AssertionError(f"{suite}/{group}: need as many predictions as measurements")
    if not len(p):
        raise TraincastError(f"{suite}: no row of the tables is of '{group}'; give the whole tables")
    signed = p / m - 1.0
    absolute = np.abs(signed)
    worst = int(np.argmax(absolute))
    return ErrorRow(
        suite=suite,
        group=group,
        n=len(p),
        gmae=100 * float(np.exp(np.mean(np.log(np.maximum(absolute, _SMALLEST))))),
        mape=100 * float(np.mean(absolute)),
        median=100 * float(np.median(absolute)),
        worst=100 * float(signed[worst]),
        worst_case=names[worst] if names is not None else "",
        bias=100 * float(np.mean(signed)),
        reference=reference,
        covered=None if inside is None else 100 * float(np.mean(inside)),
        half_width=None if half_widths is None else float(np.median(half_widths)),
    )


def compute_mean_error_percent(predicted: FloatArray, measured: FloatArray) -> float:
    """Mean absolute error, percent of what was measured."""
    return 100 * float(np.mean(np.abs(predicted / measured - 1)))


def compute_half_widths(sigma: FloatArray) -> FloatArray:
    """Half the 90 % interval of predictions with this log-sigma, percent of them."""
    return np.asarray(100 * np.sinh(Z90 * sigma))


def is_within_interval(predicted: FloatArray, measured: FloatArray, sigma: FloatArray) -> BoolArray:
    """Which measurements are in the 90 % interval of a prediction with this log-sigma."""
    return np.asarray(np.abs(np.log(predicted / measured)) <= Z90 * sigma)
