"""Curves of measured collectives: time over size, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.collectives.model import SMALL_BYTES, Curve

# 10 us up to 1 kB, then to 30 us at 21 kB (1 GB/s), then to 130 us at 1,021 kB (10 GB/s)
CURVE = Curve(
    bytes=np.array([1e3, 21e3, 1021e3]),
    seconds=np.array([10e-6, 30e-6, 130e-6]),
    sigma=(0.1, 0.05),
    measured=(1e3, 1021e3),
)


@pytest.mark.parametrize(
    ("size", "microseconds"),
    [(0, 10), (1e3, 10), (11e3, 20), (21e3, 30), (521e3, 80), (1021e3, 130), (2021e3, 230)],
)
def test_a_curve_is_flat_then_straight_and_goes_on_at_its_last_bandwidth(size, microseconds):
    assert CURVE.at(np.array([float(size)]))[0] == pytest.approx(1e-6 * microseconds)


def test_floor_and_bandwidth_are_those_of_its_ends():
    assert CURVE.floor == 10e-6
    assert CURVE.bandwidth == pytest.approx(1e10)


def test_a_flat_end_has_a_bandwidth_all_the_same():
    flat = Curve(bytes=np.array([1.0, 2.0]), seconds=np.array([1e-6, 1e-6]), sigma=(0.1, 0.1), measured=(1.0, 2.0))
    assert np.isfinite(flat.at(np.array([1e9]))).all()


def test_small_and_large_messages_have_spreads_of_their_own():
    assert CURVE.sigma_at(np.array([1.0, SMALL_BYTES, SMALL_BYTES + 1.0])).tolist() == [0.1, 0.1, 0.05]


def test_a_curve_covers_what_was_measured():
    assert CURVE.covers(np.array([999.0, 1e3, 1021e3, 1.1e6])).tolist() == [False, True, True, False]


def test_a_curve_survives_being_written_down():
    again = Curve.from_json(CURVE.to_json())
    assert np.array_equal(again.bytes, CURVE.bytes)
    assert again.seconds == pytest.approx(CURVE.seconds)
    assert (again.sigma, again.measured) == (CURVE.sigma, CURVE.measured)
