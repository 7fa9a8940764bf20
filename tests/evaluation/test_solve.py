"""The small solvers that fits are made of."""

from __future__ import annotations

import numpy as np
import pytest

from traincast_evaluation.solve import compute_spread_90, fit_relative, solve_nonnegative


def test_non_negative_least_squares_leaves_out_what_would_be_negative():
    random = np.random.default_rng(3)
    matrix = random.uniform(0.1, 1.0, size=(40, 3))
    target = matrix @ [2.0, 0.5, -0.1]

    solution = solve_nonnegative(matrix, target)

    assert solution[2] == 0.0
    assert (solution[:2] > 0).all()
    np.testing.assert_allclose(solution[:2], np.linalg.lstsq(matrix[:, :2], target, rcond=None)[0], rtol=1e-9)


def test_a_relative_fit_shrugs_off_a_few_wild_rows():
    random = np.random.default_rng(4)
    features = random.uniform(0.1, 10, size=(300, 2))
    seconds = features @ np.array([2.0, 0.5])
    seconds[::30] *= 5
    np.testing.assert_allclose(fit_relative(features, seconds), [2.0, 0.5], rtol=0.05)


def test_a_conformal_spread_covers_nine_in_ten():
    random = np.random.default_rng(5)
    measured = np.exp(random.normal(0, 0.2, 2000))
    sigma = compute_spread_90(np.ones(1000), measured[:1000])
    assert sigma == pytest.approx(0.2, rel=0.1)
    assert np.mean(np.abs(np.log(measured[1000:])) <= 1.645 * sigma) == pytest.approx(0.9, abs=0.03)
