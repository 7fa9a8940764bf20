"""The rates of embedding kernels that measured times tell: damped least squares on log time, in plain numpy.

Kernels that were timed by themselves tell the rates of memory; whole lookups (`embedding.whole`) then tell those of
links, caches and ATen's kernels, and what a stopwatch on the host adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from traincast.costs.kernels.embedding.traffic import Rates, embedding_seconds
from traincast.costs.kernels.embedding.watches import WATCHES, Watches
from traincast.costs.kernels.embedding.whole import WholeLookups
from traincast.costs.kernels.model import Measurements
from traincast.utils.arrays import FloatArray

FITTED = (
    "start_seconds", "update_start_seconds", "read_share", "scattered_write_share", "sorted_write_share",
    "l2_bytes_per_clock", "long_row_seconds", "long_row_l2_share", "lookup_seconds", "lookup_l2_seconds",
)  # fmt: skip
"""Rates fitted together. `empty_block_cycles` is seen in one of an update's two kernels only, and read off that."""
FITTED_TO_WHOLE = (
    "select_seconds", "select_dram_seconds", "gather_share", "host_read_share", "host_update_share", "peer_share",
    "fused_write_share", "gradient_write_share", "fill_cycles",
)  # fmt: skip
"""Rates that only whole lookups tell."""
_KNEE = 0.1  # residuals beyond count linearly (Huber): bags of the smallest job are not known
_TOWARDS_START = 0.02  # decides only what the rows leave open
_STEP = 1e-4  # of log rates, either side, for a slope
_LONGEST_STEP = 0.3  # of log rates: no rate changes by more than a third at once
_ROUNDS = 60  # of the method, at most
_STILL = 1e-7  # of the loss: a step that gains no more is the last


def fitted_rates(data: Measurements, start: Rates) -> Rates:
    """The rates that meet the measured times best in relative error; `start` where no row tells."""
    begin = np.log([getattr(start, name) for name in FITTED])
    parts = [(data.calls.take(data.device == i), device, data.device == i) for i, device in enumerate(data.devices)]
    measured = np.log(data.seconds)

    def residuals(log_rates: FloatArray) -> FloatArray:
        rates, error = _rates(start, log_rates), np.empty(len(measured))
        for calls, device, mine in parts:
            error[mine] = np.log(embedding_seconds(calls, device, rates)) - measured[mine]
        return np.concatenate([error, _TOWARDS_START * (log_rates - begin)])

    return _rates(start, _least_squares(residuals, begin, _top(FITTED)))


def fitted_to_whole(lookups: WholeLookups, start: Rates) -> tuple[Rates, Watches]:
    """The rates of `FITTED_TO_WHOLE` and what the stopwatch adds, which meet whole lookups best in relative error."""
    watches = Watches()
    begin = np.log([*(getattr(start, name) for name in FITTED_TO_WHOLE), *(watches.of(name) for name in WATCHES[1:])])
    measured = np.log(lookups.measured)

    def told(logs: FloatArray) -> tuple[Rates, Watches]:
        count = len(FITTED_TO_WHOLE)
        return _rates(start, logs[:count], FITTED_TO_WHOLE), Watches(*np.exp(logs[count:]).tolist())

    def residuals(logs: FloatArray) -> FloatArray:
        error = np.log(lookups.seconds(*told(logs))) - measured
        return np.concatenate([error, _TOWARDS_START * (logs - begin)])

    return told(_least_squares(residuals, begin, _top((*FITTED_TO_WHOLE, *WATCHES[1:]))))


def _top(names: Sequence[str]) -> FloatArray:
    """The logarithm of what each rate can be at most: shares are at most one."""
    return np.array([0.0 if name.endswith("_share") else np.inf for name in names])


def _rates(start: Rates, log_rates: FloatArray, names: tuple[str, ...] = FITTED) -> Rates:
    return replace(start, **{name: float(value) for name, value in zip(names, np.exp(log_rates), strict=True)})


def _least_squares(residuals: Callable[[FloatArray], FloatArray], begin: FloatArray, top: FloatArray) -> FloatArray:
    """Levenberg and Marquardt's method with Huber's weights; never beyond `top`."""
    place, damping = begin, 1e-3
    error = residuals(place)
    for _ in range(_ROUNDS):
        slope = np.stack([_slope(residuals, place, i) for i in range(len(place))], axis=1)
        weight = np.minimum(1.0, _KNEE / np.maximum(np.abs(error), 1e-12))
        normal = slope.T @ (weight[:, None] * slope)
        pull = slope.T @ (weight * error)
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
        trial = np.minimum(place + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP), top)
        tried = residuals(trial)
        before, after = _loss(error), _loss(tried)
        if after >= before:
            damping *= 10.0
            continue
        place, error, damping = trial, tried, max(0.3 * damping, 1e-9)
        if before - after < _STILL * before:
            break
    return place


def _slope(residuals: Callable[[FloatArray], FloatArray], place: FloatArray, index: int) -> FloatArray:
    aside = np.zeros(len(place))
    aside[index] = _STEP
    return np.asarray((residuals(place + aside) - residuals(place - aside)) / (2.0 * _STEP))


def _loss(error: FloatArray) -> float:
    size = np.abs(error)
    return float(np.sum(np.where(size < _KNEE, 0.5 * size**2, _KNEE * (size - 0.5 * _KNEE))))
