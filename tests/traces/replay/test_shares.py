"""What stages of a prediction add to its error."""

from __future__ import annotations

import pytest

from traincast.traces.replay.attribution import StepShares, compute_gmae


def shares(measured=10.0, **stages):
    return StepShares(number=1, measured=measured, stages=stages)


def test_every_stage_adds_its_difference_to_the_one_before():
    step = shares(simulation=11.0, kernels=9.0, overheads=12.0)

    assert step.compute_shares() == pytest.approx({"simulation": 0.1, "kernels": -0.2, "overheads": 0.3})
    assert step.error == pytest.approx(0.2)
    assert (step.replayed, step.full) == (11.0, 12.0)


def test_the_shares_are_the_error_however_many_stages():
    step = shares(simulation=8.0, kernels=9.0, collectives=9.5, overheads=7.0)

    assert sum(step.compute_shares().values()) == pytest.approx(step.error)


def test_a_step_that_took_no_time_has_no_error():
    step = shares(measured=0.0, simulation=1.0, kernels=2.0)

    assert step.error == 0.0
    assert step.compute_shares() == {"simulation": 0.0, "kernels": 0.0}


def test_gmae_is_the_geometric_mean_of_sizes():
    assert compute_gmae([0.1, -0.4]) == pytest.approx(0.2)
    assert compute_gmae([]) == 0.0


def test_an_error_of_zero_does_not_make_the_mean_zero():
    assert compute_gmae([0.0, 0.01]) == pytest.approx(0.001)
