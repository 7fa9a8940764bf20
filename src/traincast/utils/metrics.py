"""Figures reported one way: accuracy (n, GMAE, MAPE, median, worst, bias), 90 % intervals and what would narrow them,
sums by name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.errors import TraincastError

Key = TypeVar("Key", bound=Hashable)


def sum_by_key(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """What is said of each key together, the largest first; of equal ones the first that was named.

    >>> totals([("gemm", 1.0), ("copy", 5.0), ("gemm", 2.0)])
    {'copy': 5.0, 'gemm': 3.0}
    """
    sums: dict[Key, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


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


MEASURED = 0.03
"""Log-sigma of a time that was measured: what is left of the error of what takes that time."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a step's time is made of and that can be measured: its share of the time and the log-sigma of its
    prediction. Errors of one `group` go the same way and add up; those of different groups are independent. A part
    without a group has one of its own."""

    share: float
    spread: float
    group: Hashable = None

    @property
    def error(self) -> float:
        """Log-sigma of the step from this part."""
        return self.share * self.spread

    @property
    def removed(self) -> float:
        """What of that goes if it is measured."""
        return self.share * max(self.spread - MEASURED, 0.0)


def compute_half_width(parts: Mapping[Key, Part]) -> float:
    """Half the 90 % interval of the step, as a share of its time."""
    return _compute_width(sum(error**2 for error in _sum_errors_by_group(parts).values()))


def rank_by_remaining_width(parts: Mapping[Key, Part]) -> dict[Key, float]:
    """The half-width that is left when each part alone is measured, the one that narrows most first.

    >>> [name for name in ranked({"gemm": Part(0.8, 0.1), "host": Part(0.1, 0.4), "copy": Part(0.1, 0.03)})]
    ['gemm', 'host', 'copy']
    """
    errors = _sum_errors_by_group(parts)
    whole = sum(error**2 for error in errors.values())
    left = {
        key: _compute_width(whole - _compute_variance_reduction(errors[_group_key(key, part)], part))
        for key, part in parts.items()
    }
    return dict(sorted(left.items(), key=lambda item: item[1]))


def order_by_narrowing(parts: Mapping[Key, Part]) -> dict[Key, float]:
    """The order in which to measure, each time what narrows most of what is left; with the half-width left then."""
    errors = _sum_errors_by_group(parts)
    waiting: dict[Hashable, list[Key]] = defaultdict(list)  # of a group, the one that removes most at the end
    for key in sorted(parts, key=lambda key: (parts[key].removed, parts[key].error)):
        waiting[_group_key(key, parts[key])].append(key)
    order: dict[Key, float] = {}
    while waiting:
        best = max(waiting, key=lambda group: _compute_variance_reduction(errors[group], parts[waiting[group][-1]]))
        key = waiting[best].pop()
        errors[best] -= parts[key].removed
        order[key] = _compute_width(sum(error**2 for error in errors.values()))
        if not waiting[best]:
            del waiting[best]
    return order


def _group_key(key: Hashable, part: Part) -> Hashable:
    return ("alone", key) if part.group is None else ("group", part.group)


def _sum_errors_by_group(parts: Mapping[Key, Part]) -> dict[Hashable, float]:
    errors: dict[Hashable, float] = defaultdict(float)
    for key, part in parts.items():
        errors[_group_key(key, part)] += part.error
    return errors


def _compute_variance_reduction(error: float, part: Part) -> float:
    """By how much the variance of a step falls when a part of a group with this error is measured."""
    return error**2 - (error - part.removed) ** 2


def _compute_width(variance: float) -> float:
    return math.exp(Z90 * math.sqrt(max(variance, 0.0))) - 1
