"""The process that corrects a kind by shape: its slopes are those of its likelihood, and it finds what matters."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.cpu import estimator
from traincast.costs.cpu.estimator import Process, find_process


def swinging(number=80):
    """Places in two coordinates, of which the first matters, and what their logarithms deviate by."""
    random = np.random.default_rng(0)
    places = random.uniform(0, 16, (number, 2))
    return places, 0.3 * np.sin(0.8 * places[:, 0]) + random.normal(0, 0.02, number)


def test_slopes_are_those_of_the_likelihood():
    places, residuals = swinging(30)
    at = np.log([3.0, 20.0, 0.4, 0.05])
    slopes = estimator._compute_likelihood(places, residuals, at)[1]
    for position, slope in enumerate(slopes):
        step = np.zeros(len(at))
        step[position] = 1e-5
        above, below = (estimator._compute_likelihood(places, residuals, at + sign * step)[0] for sign in (1, -1))
        assert slope == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-4)


def test_what_does_not_matter_is_far_longer_than_what_does():
    found = find_process(*swinging())
    assert found.lengths[1] > 5 * found.lengths[0]
    assert found.noise == pytest.approx(0.02, abs=0.01)


def test_a_search_that_begins_near_by_ends_there():
    places, residuals = swinging()
    found = find_process(places, residuals)
    again = find_process(places, residuals, found)
    best = [
        estimator._compute_likelihood(places, residuals, np.log([*one.lengths, *one[1:]]))[0] for one in (found, again)
    ]
    assert best[1] >= best[0] - 1e-6


def test_few_samples_say_nothing_of_lengths():
    found = find_process(np.zeros((2, 3)), np.array([0.1, -0.1]))
    assert len(set(found.lengths)) == 1 and found.noise == estimator._NOISE[2]
    inverse, pull = Process(np.ones(3), 0.1, 0.1).solved(np.zeros((0, 3)), np.zeros(0))
    assert inverse.shape == (0, 0) and len(pull) == 0
