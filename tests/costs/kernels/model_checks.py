"""Checks that every kernel model passes, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.costs.kernels.contract import Calls, KernelModel
from traincast.hardware import Device
from traincast.utils.arrays import FloatArray


def check_contract(model: KernelModel, calls: Calls, device: Device) -> None:
    """Positive and finite, one value a call, independent of company and order, and unchanged by its own state."""
    estimate = model.predict(calls, device)
    for values in (estimate.seconds, estimate.sigma, estimate.in_domain):
        assert len(values) == len(calls)
    assert np.isfinite(estimate.seconds).all()
    assert (estimate.seconds > 1e-7).all(), "no kernel takes less than a tenth of a microsecond"
    assert (estimate.sigma > 0).all()
    assert np.isfinite(estimate.sigma).all()
    assert estimate.in_domain.dtype == np.bool_

    again = model.predict(calls, device)
    assert np.array_equal(again.seconds, estimate.seconds), "the same question has one result"

    backwards = model.predict(calls.take(np.arange(len(calls))[::-1]), device)
    np.testing.assert_allclose(backwards.seconds[::-1], estimate.seconds, rtol=1e-4)

    restored = type(model).from_state(model.state()).predict(calls, device)
    assert np.array_equal(restored.seconds, estimate.seconds)
    assert np.array_equal(restored.sigma, estimate.sigma)

    nothing = model.predict(calls.take(np.zeros(len(calls), dtype=np.bool_)), device)
    assert len(nothing.seconds) == len(nothing.sigma) == len(nothing.in_domain) == 0


def check_monotone(model: KernelModel, growing: Sequence[Calls], device: Device, *, slack: float = 0.0) -> None:
    """Of calls that grow from one set to the next, each takes at least as long as the one before, up to `slack`."""
    took = np.stack([model.predict(calls, device).seconds for calls in growing])
    assert (took[1:] >= (1.0 - slack) * took[:-1]).all(), took


def check_unit(model: KernelModel, calls: Calls, least_seconds: FloatArray, device: Device) -> None:
    """Seconds: no large call beats what the sheet allows, none is as far off as another unit would be."""
    share = least_seconds / model.predict(calls, device).seconds
    assert (share <= 1.05).all(), share
    assert (share > 1 / 300).all(), share
