"""Series, their correction for drift, and what they say about disturbances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.costs.cpu.made_up import samples
from traincast.calibration.bench.device import Series, compute_median_interval, summarise_series
from traincast.calibration.bench.measure import note_disturbances


def series(work, reference, waited=1.0):
    busy, beside = np.array(work, dtype=float), np.array(reference, dtype=float)
    return Series(waited * busy, busy, waited * beside, beside)


def test_drift_divides_out():
    drift = np.array([1.0, 1.3, 0.9, 1.2, 1.1])
    figures = summarise_series(series(10 * drift, 2 * drift), "wall")
    assert figures.corrected == pytest.approx(5 * np.median(2 * drift))
    assert figures.spread == pytest.approx(0.0)
    assert (figures.low, figures.high) == (figures.corrected, figures.corrected)


def test_seconds_of_another_moment_are_ratios_times_its_reference():
    figures = summarise_series(series([10, 10, 10], [2, 2, 2]), "busy", nominal=3.0)
    assert figures.corrected == pytest.approx(15.0)
    assert figures.median == 10.0


def test_the_clock_is_chosen_by_name():
    held_up = series([1, 1, 1], [1, 1, 1], waited=2.0)
    assert summarise_series(held_up, "wall").median == 2.0
    assert summarise_series(held_up, "busy").median == 1.0


def test_neighbours_are_noticed():
    assert series([1] * 9, [1] * 9, waited=1.25).notes() == (
        "other programs had the processor for 20% of the time; end them",
    )
    assert series([1] * 9, [1] * 9, waited=1.04).notes() == ()
    short = replace(series([1] * 9, [1] * 9), reference_wall=np.full(9, 1.25))
    assert short.notes()[0].startswith("other programs had the processor for 20%"), "the reference was cut off"


def test_a_clock_that_moves_is_noticed():
    (said,) = series([1.0] * 8, [1, 1, 1, 1, 1, 1, 1.5, 1.5]).notes()
    assert said.startswith("the reference drifted by 50% (throttling or neighbours)")


@pytest.mark.parametrize("count", [3, 30, 101])
def test_the_interval_of_a_median_covers_it_nine_times_in_ten(count):
    random = np.random.default_rng(count)
    hits = 0
    for _ in range(400):
        low, high = compute_median_interval(np.sort(random.normal(size=count)))
        hits += low <= 0.0 <= high
    assert hits / 400 >= (0.7 if count == 3 else 0.87)
    assert hits / 400 <= 0.97


def sample(wait=1.0, drift=1.0, spread=0.01):
    return replace(samples(1)[0], reference_wall=wait * drift, reference_busy=drift, spread=spread)


def test_a_run_says_what_disturbed_it():
    assert note_disturbances([sample()] * 20, (0.0, 0.0)) == []
    (neighbours,) = note_disturbances([sample(wait=1.25)] * 20, (1400.0, 1395.0))
    assert neighbours.startswith("other programs had the processor for 20% of the time")
    drifted = [sample(drift=1 + 0.02 * number) for number in range(20)]
    assert note_disturbances(drifted, (0.0, 0.0))[0].startswith("the reference drifted by ")
    assert note_disturbances([sample()] * 19 + [sample(spread=0.9)], (0.0, 0.0)) == [
        "1 of 20 samples spread by more than 25% and will not be used"
    ]
    assert note_disturbances([], (1410.0, 1100.0)) == [
        "the clock was 1410 MHz before and 1100 after: lock it, or let the device cool"
    ]
