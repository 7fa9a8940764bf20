"""Distribution function of Poisson counts, with numpy alone."""

from __future__ import annotations

from math import erfc, sqrt

import numpy as np

from traincast.utils.arrays import FloatArray

_SUMMED = 64  # up to here term by term; beyond, Wilson and Hilferty's normal form is right to 1e-4

_erfc = np.frompyfunc(erfc, 1, 1)


def compute_poisson_cdf(count: int | None, mean: FloatArray) -> FloatArray:
    """Probability of at most `count` for each mean; None stands for no bound. Below zero: impossible."""
    if count is None:
        return np.ones_like(mean)
    if count < 0:
        return np.zeros_like(mean)
    if count <= _SUMMED:
        term = np.exp(-np.minimum(mean, 700.0))
        total = term.copy()
        for k in range(1, count + 1):
            term = term * mean / k
            total += term
        return np.asarray(np.where(mean > 700.0, 0.0, np.minimum(total, 1.0)))
    freedom = 2.0 * (count + 1)
    spread = 2.0 / (9.0 * freedom)
    score = (np.cbrt(2.0 * mean / freedom) - (1.0 - spread)) / sqrt(spread)
    return 0.5 * np.asarray(_erfc(score / sqrt(2.0)), dtype=np.float64)
