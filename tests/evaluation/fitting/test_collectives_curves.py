"""Curves of collectives: what is pooled, what is dropped, and what a curve says of what nobody measured."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.collectives.model import SMALL_BYTES, Curve
from traincast_evaluation.fitting.collectives_curves import TOLERANCE, fit_curve, remove_host_floor, set_curve_floor

SIZES = 2.0 ** np.arange(9, 30)


def times(size):
    return 10e-6 + size / 2e11


def test_repeats_of_a_size_count_by_their_median():
    size = np.repeat(SIZES, 3)
    seconds = times(size) * np.tile([1.0, 1.01, 5.0], len(SIZES))

    np.testing.assert_allclose(fit_curve(size, seconds).at(SIZES), 1.01 * times(SIZES), rtol=TOLERANCE)


def test_a_curve_never_falls_and_never_ends_flat():
    seconds = np.where(SIZES > 2**20, 40e-6, times(SIZES))

    curve = fit_curve(SIZES, seconds)

    assert (np.diff(curve.seconds) >= 0).all()
    assert curve.seconds[-1] > curve.seconds[-2], "a flat end would promise infinite bandwidth"


def test_the_spread_tells_small_messages_from_large_ones():
    """Given large messages that scatter and small ones that do not; then only the former are known less well."""
    shaken = np.where(SIZES > SMALL_BYTES, 1.0 + 0.1 * (-1.0) ** np.arange(len(SIZES)), 1.0)

    small, large = fit_curve(SIZES, times(SIZES) * shaken).sigma

    assert small == pytest.approx(0.02, abs=0.01)
    assert large > 2 * small


def test_a_host_s_floor_is_replaced_by_the_device_s():
    curve = fit_curve(SIZES, 100e-6 + SIZES / 2e11)

    device = remove_host_floor(curve, 10e-6)

    np.testing.assert_allclose(device.seconds, curve.seconds - curve.floor + 10e-6)
    assert device.measured[0] > curve.measured[0], "near the floor the host hid the device"
    assert device.sigma[0] > curve.sigma[0]


def test_a_curve_of_large_messages_is_led_down_to_a_floor():
    curve = Curve(np.array([1e8, 1e9]), np.array([1e-3, 1e-2]), (0.02, 0.02), (1e8, 1e9))

    longer = set_curve_floor(curve, 20e-6)

    assert longer.bytes[0] == 1.0 and longer.seconds[0] == 20e-6
    assert longer.at(np.array([1e9]))[0] == pytest.approx(1e-2)
    assert longer.measured == curve.measured and longer.sigma[0] > curve.sigma[0]
