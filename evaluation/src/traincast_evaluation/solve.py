"""Small solvers that fits share, in plain numpy: the same numbers on every machine that has numpy.

Some fits have columns that the measurements cannot tell apart (softmax on some cards). Another solver, such as scipy's,
chooses otherwise among them, and what it predicts of sizes that were not measured differs by up to a factor of four.
With this one a refit keeps the shipped bytes.
"""

from __future__ import annotations

import numpy as np

from traincast.utils.arrays import FloatArray
from traincast.utils.metrics import Z90


def solve_nonnegative(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Non-negative least squares (Lawson and Hanson's active set method)."""
    gram, moment = matrix.T @ matrix, matrix.T @ target
    size = len(moment)
    x = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(moment).max()), 1e-30)
    for _ in range(30 * size):
        slope = moment - gram @ x
        slope[free] = -np.inf
        if slope.max() <= tolerance:
            break
        free[int(np.argmax(slope))] = True
        for _ in range(size):
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
            if (trial[free] > 0).all():
                break
            blocked = free & (trial <= 0)
            step = float(np.min(x[blocked] / np.maximum(x[blocked] - trial[blocked], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-15 * max(float(x.max()), 1e-300)
            x[~free] = 0.0
        x = trial
    return x


def fit_relative(
    features: FloatArray,
    seconds: FloatArray,
    *,
    base: FloatArray | float = 0.0,
    weight: FloatArray | None = None,
    knee: float = 0.05,
    rounds: int = 4,
) -> FloatArray:
    """Non-negative coefficients with `base + features @ coefficients` near `seconds`, in relative error.

    Residuals beyond `knee` count linearly (Huber), so that a few bad measurements do not steer the fit.
    """
    rows = features / seconds[:, None]
    scale = rows.max(axis=0) + 1e-300
    rest = 1.0 - base / seconds
    prior = np.ones(len(seconds)) if weight is None else weight
    pull = prior.copy()
    solution = np.zeros(features.shape[1])
    for _ in range(rounds):
        solution = solve_nonnegative((rows / scale) * pull[:, None], rest * pull) / scale
        error = np.abs(rows @ solution - rest)
        pull = prior * np.sqrt(np.minimum(1.0, knee / np.maximum(error, 1e-12)))
    return solution


def compute_spread_90(predicted: FloatArray, measured: FloatArray, base: FloatArray | float = 0.0) -> float:
    """The log-sigma that, with `base` in quadrature, makes a ±1.645 sigma interval hold 90 % of measurements."""
    if not len(measured):
        return 0.0
    needed = (np.log(predicted / measured) / Z90) ** 2 - np.square(base)
    n = len(needed)
    rank = min(n - 1, int(np.ceil(0.9 * (n + 1))) - 1)
    return float(np.sqrt(max(np.sort(needed)[rank], 1e-6)))
