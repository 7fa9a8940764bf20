"""The fitting protocol: what fits see, how spreads are judged, and what a profile says of itself."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.evaluation.kernels.made_up import KEYS, RateModel, Rates, RateTraining, made_up_samples
from traincast_evaluation.kernels.evaluate import summarise_by_device, summarise_samples, summarise_unseen_chips
from traincast_evaluation.kernels.fit import (
    UNJUDGED_SPREAD,
    compute_device_spreads,
    compute_unseen_spread,
    ignore_progress,
    leave_one_chip_out,
)


def test_no_fit_sees_a_held_out_sample_nor_one_that_the_host_hides(tmp_path):
    training = RateTraining(made_up_samples())

    training(tmp_path, tmp_path, ignore_progress)

    assert len(training.seen) == 1 + len(KEYS), "the fit itself, and one without every device's chip"
    assert not any(part.held_out.any() or part.hidden.any() for part in training.seen)
    assert len(training.seen[0]) == 3 * (40 - 8 - 1)


def test_a_profile_keeps_its_numbers_and_where_they_come_from(tmp_path):
    heard = []
    training = RateTraining(made_up_samples(share=(0.5, 0.5, 0.5)))

    provenance = training(tmp_path, tmp_path, lambda what, share: heard.append(share))

    assert provenance["rows_fitted"] == 93 and provenance["rows_held_out"] == 24
    assert provenance["mean_error_percent_held_out"] == pytest.approx(0.0, abs=1e-9)
    assert provenance["interval_coverage_held_out"] == 1.0
    assert provenance["devices"] == list(KEYS)
    assert json.loads((tmp_path / "rates.json").read_text()) == provenance
    with np.load(tmp_path / "rates.npz") as state:
        assert state["share"][0] == pytest.approx(0.5)
    assert heard == sorted(heard) and (heard[0], heard[-1]) == (0.0, 1.0)


def test_the_same_samples_give_the_same_bytes(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        RateTraining(made_up_samples())(tmp_path, tmp_path / name, ignore_progress)

    for file in ("rates.npz", "rates.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_a_chip_is_left_out_with_every_card_that_has_it():
    samples = made_up_samples()
    everything = np.ones(len(samples), dtype=bool)

    left = dict(leave_one_chip_out(samples, everything))

    assert np.array_equal(left[0], samples.device == 2), "the two V100 have one chip"
    assert np.array_equal(left[1], samples.device == 2)
    assert np.array_equal(left[2], samples.device < 2)


def test_the_spread_of_unseen_chips_is_what_other_chips_predict():
    """Given cards at 0.5 and 0.8 of the sheet's rate; then each is predicted from the other, off by log(1.6)."""
    samples = made_up_samples(offset=0.0)
    training = RateTraining(samples)
    use = ~samples.held_out & samples.telling

    sigma = compute_unseen_spread(samples, use, use, lambda others: training.predictor(training.fit(others)))

    assert sigma == pytest.approx(np.log(1.6) / 1.645, rel=1e-6)


def test_with_one_chip_nobody_can_judge_the_others():
    samples = made_up_samples()
    one = samples.take(samples.device == 2)

    assert compute_unseen_spread(one, one.telling, one.telling, lambda others: pytest.fail("no fit")) == UNJUDGED_SPREAD


def test_a_device_is_judged_by_its_own_samples():
    samples = made_up_samples(offset=0.0)
    predict = RateModel(Rates(0.5)).predict

    sigma = compute_device_spreads(samples, samples.telling, predict, ("t4", "v100"), least=0.01)

    assert sigma == pytest.approx([np.log(1.6) / 1.645, 0.01])


def test_tables_of_errors_are_by_device_and_by_chip_left_out():
    samples = made_up_samples(share=(0.5, 0.5, 0.5))
    training = RateTraining(samples)
    predict = RateModel(Rates(0.5)).predict

    rows = summarise_by_device("known", samples, samples.held_out, predict)
    unseen = summarise_unseen_chips(
        "unseen", samples, samples.held_out, lambda some: training.predictor(training.fit(some))
    )
    one = summarise_samples("all", "together", samples.take(samples.held_out), predict, "others: 3 %")

    assert [(row.suite, row.group, row.n) for row in rows] == [("known", key, 8) for key in KEYS]
    assert [row.covered for row in rows] == [100.0] * 3
    assert [(row.group, row.covered) for row in unseen] == [(key, None) for key in KEYS], "spreads were not judged"
    assert (one.n, one.reference) == (24, "others: 3 %")
    assert max(row.mape for row in (*rows, *unseen, one)) == pytest.approx(0.0, abs=1e-9)
