"""Error figures, exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Z90, compute_error_row, is_within_interval


def test_every_measure_of_three_known_errors():
    # errors of +10, -20 and +40 %
    row = compute_error_row("suite", "group", [11.0, 8.0, 14.0], [10.0, 10.0, 10.0], ["a", "b", "c"], "theirs")

    assert (row.suite, row.group, row.n, row.reference) == ("suite", "group", 3, "theirs")
    assert row.gmae == pytest.approx(100 * (0.1 * 0.2 * 0.4) ** (1 / 3))
    assert row.mape == pytest.approx(70 / 3)
    assert row.median == pytest.approx(20.0)
    assert (row.worst, row.worst_case) == (pytest.approx(40.0), "c")
    assert row.bias == pytest.approx(10.0)
    assert row.covered is None


def test_the_worst_error_keeps_its_sign():
    assert compute_error_row("s", "g", [5.0, 11.0], [10.0, 10.0]).worst == pytest.approx(-50.0)
    assert compute_error_row("s", "g", [5.0, 11.0], [10.0, 10.0]).worst_case == ""


def test_one_lucky_hit_does_not_pull_the_geometric_mean_to_nothing():
    assert compute_error_row("s", "g", [10.0], [10.0]).gmae == pytest.approx(0.01)


def test_coverage_is_a_percentage():
    row = compute_error_row(
        "s", "g", [1.0] * 4, [1.0] * 4, inside=np.array([True, True, True, False]), half_widths=np.array([1.0, 2, 4, 9])
    )
    assert (row.covered, row.half_width) == (75.0, 3.0)


@pytest.mark.parametrize(("predicted", "measured"), [([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_predictions_without_their_measurements_are_a_mistake_of_ours(predicted, measured):
    with pytest.raises(AssertionError, match="as many predictions as measurements"):
        compute_error_row("s", "g", predicted, measured)


def test_a_group_without_rows_is_one_line():
    with pytest.raises(TraincastError, match="some: no row of the tables is of 'group'; give the whole tables"):
        compute_error_row("some", "group", [], [])


def test_the_interval_is_symmetric_in_the_logarithm():
    sigma = 0.1
    edge = math.exp(Z90 * sigma)
    measured = np.array([edge * 0.999, edge * 1.001, 1 / edge * 1.001, 1 / edge * 0.999])
    assert is_within_interval(np.ones(4), measured, np.full(4, sigma)).tolist() == [True, False, True, False]
