"""The estimator: terms that are physics, and a process that returns to them where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.costs.cpu.estimator import KindModel, fit_kind, fit_terms, solve_non_negative


def truth(places):
    """Seconds of a made-up kernel: a call, a byte, and an efficiency that swings with the size."""
    numbers = 2.0 ** places[:, 0]
    return (2e-6 + 1e-9 * numbers) * (1.0 + 0.3 * np.sin(places[:, 0]))


def described(places):
    return np.stack([np.ones(len(places)), 2.0 ** places[:, 0]], axis=1)


@pytest.fixture(scope="module")
def model():
    places = np.linspace(4, 20, 60)[:, None]
    return fit_kind(described(places), places, truth(places))


def test_shapes_between_those_measured_are_interpolated(model):
    places = np.linspace(5, 19, 23)[:, None]
    guessed = [model.predict(t, p)[0] for t, p in zip(described(places), places, strict=True)]
    assert np.max(np.abs(np.array(guessed) / truth(places) - 1)) < 0.03


def test_far_from_all_samples_the_terms_remain_and_the_interval_widens(model):
    far, near = np.array([400.0]), np.array([12.0])
    seconds, sigma = model.predict(np.array([1.0, 2.0**40]), far)
    assert seconds == pytest.approx(float(np.array([1.0, 2.0**40]) @ model.coefficients), rel=1e-6)
    assert sigma > 3 * model.predict(np.array([1.0, 2.0**12]), near)[1]


def test_a_model_survives_being_written_down(model):
    again = KindModel.from_dict(model.to_dict())
    for place in (5.0, 11.3, 25.0):
        terms = np.array([1.0, 2.0**place])
        assert again.predict(terms, np.array([place])) == pytest.approx(
            model.predict(terms, np.array([place])), rel=2e-3
        )


def test_least_squares_never_go_below_zero():
    random = np.random.default_rng(0)
    columns = random.random((50, 4))
    exact = np.array([2.0, 0.0, 1.0, 0.5])
    assert solve_non_negative(columns, columns @ exact) == pytest.approx(exact, abs=1e-3)
    pulled = solve_non_negative(columns, columns @ np.array([1.0, -1.0, 0.0, 0.0]))
    assert (pulled >= 0).all()
    assert solve_non_negative(np.zeros((3, 2)), np.ones(3)).tolist() == [0.0, 0.0]


def test_one_sample_is_enough_for_a_guess():
    model = fit_kind(np.array([[1.0, 8.0]]), np.array([[3.0]]), np.array([1e-5]))
    assert model.predict(np.array([1.0, 8.0]), np.array([3.0]))[0] == pytest.approx(1e-5, rel=0.01)


def test_what_no_sample_has_gets_no_price():
    terms = np.array([[1.0, 1e-90], [1.0, 3e-90], [1.0, 2e-90]])
    assert fit_terms(terms, np.array([1e-6, 3e-6, 2e-6]))[1] == 0.0


@pytest.mark.parametrize("name", ["coefficients", "residuals", "lengths"])
def test_a_number_where_a_list_belongs_is_rejected(model, name):
    with pytest.raises(ValueError, match="list belongs"):
        KindModel.from_dict({**model.to_dict(), name: 1.0})
