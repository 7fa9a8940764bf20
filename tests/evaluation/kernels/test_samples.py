"""Measured samples: selections, chips, and what a stopwatch shows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.evaluation.kernels.made_up import RateModel, Rates, made_up_samples


def test_a_selection_keeps_the_list_of_devices_and_all_columns():
    samples = made_up_samples()

    some = samples.take(samples.device == 2)

    assert some.devices == samples.devices
    assert len(some) == len(some.calls) == len(some.offset) == len(some.hidden) == 40
    assert np.array_equal(some.calls["bytes"], samples.calls["bytes"][80:])
    assert np.array_equal(samples.take(np.array([3, 1])).seconds, samples.seconds[[3, 1]])


def test_measurements_name_only_the_devices_that_are_left():
    data = made_up_samples().take(np.arange(120) >= 40).measurements()

    assert [device.key for device in data.devices] == ["v100", "t4"]
    assert np.array_equal(np.unique(data.device), [0, 1])


def test_measurements_are_kernel_times():
    samples = made_up_samples(offset=5e-6)

    assert samples.measurements().seconds == pytest.approx(samples.seconds - 5e-6)


def test_cards_with_one_chip_belong_together():
    samples = made_up_samples()

    assert np.array_equal(samples.same_chip(0), samples.device < 2)
    assert np.array_equal(samples.same_chip(2), samples.device == 2)


def test_predictions_are_made_device_by_device_and_shown_as_the_stopwatch_would():
    samples = made_up_samples(share=(0.5, 0.5, 0.5), offset=5e-6)
    predict = RateModel(Rates(0.5)).predict

    kernel, sigma = samples.kernel_seconds(predict)
    shown, _ = samples.predicted(predict)

    assert kernel == pytest.approx(samples.seconds - 5e-6)
    assert shown == pytest.approx(samples.seconds)
    assert sigma == pytest.approx(0.1)


def test_a_sample_is_named_by_its_sizes():
    assert made_up_samples().names()[:2] == ["1000000", "2000000"]
