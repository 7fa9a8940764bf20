"""Measured cases, their outcomes, and how errors are added up: exact figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario
from traincast_evaluation.suites.cases import Case, Outcome, run_cases, summarise, summarise_outcomes

STEP = Scenario(workload="dlrm-default", on="v100", batch_size=256)


def outcome(name="a", group="V100", measured=10.0, predicted=11.0, *, active=None, **others):
    case = Case(name=name, group=group, question=STEP, measured_ms=measured, measured_active_ms=active, others=others)
    return Outcome(case=case, predicted_ms=predicted, low_ms=9.0, high_ms=12.0, active_ms=4.0)


def test_errors_are_signed_percentages_of_what_was_measured():
    assert outcome(measured=10.0, predicted=11.0).error_percent == pytest.approx(10.0)
    assert outcome(measured=20.0, predicted=15.0).error_percent == pytest.approx(-25.0)
    assert outcome(active=5.0).active_error_percent == pytest.approx(-20.0)
    assert outcome().active_error_percent is None


@pytest.mark.parametrize(("measured", "covered"), [(8.9, False), (9.0, True), (12.0, True), (12.1, False)])
def test_a_measurement_on_the_edge_of_the_interval_is_covered(measured, covered):
    assert outcome(measured=measured).covered is covered


def test_a_case_is_predicted_as_its_question_says():
    heard = []

    (done,) = run_cases([Case(name="a", group="V100", question=STEP, measured_ms=1.0)], progress=heard.append)

    result = predict(STEP)
    assert done.predicted_ms == pytest.approx(1e3 * result.iteration)
    assert (done.low_ms, done.high_ms) == pytest.approx([1e3 * end for end in result.interval])
    assert done.active_ms == pytest.approx(1e3 * result.device_active)
    assert heard == [1.0]


def test_rooflines_alone_give_another_answer():
    case = Case(name="a", group="V100", question=STEP, measured_ms=1.0)

    (fitted,), (roofline,) = run_cases([case]), run_cases([case], roofline_only=True)

    assert roofline.active_ms != fitted.active_ms


def test_no_case_is_no_outcome():
    assert run_cases([]) == []


def test_one_group_has_one_line():
    (row,) = summarise("steps", [outcome(predicted=11.0), outcome("b", predicted=8.0)])

    assert (row.suite, row.group, row.n) == ("steps", "all: step", 2)
    assert row.mape == pytest.approx(15.0)
    assert row.bias == pytest.approx(-5.0)
    assert (row.worst, row.worst_case) == (pytest.approx(-20.0), "b")


def test_active_time_has_a_line_of_the_cases_where_it_was_measured():
    rows = summarise("steps", [outcome(active=5.0), outcome("b", active=3.2), outcome("c")], Path())

    assert [(row.group, row.n) for row in rows] == [("all: step", 3), ("all: device active", 2)]
    assert rows[1].mape == pytest.approx((20.0 + 25.0) / 2)


def test_several_groups_have_a_line_each_in_order_of_their_names():
    rows = summarise("steps", [outcome(group="V100"), outcome(group="A100"), outcome("b", group="V100")])

    assert [(row.group, row.n) for row in rows] == [("all: step", 3), ("A100", 1), ("V100", 2)]


def test_what_others_score_is_their_mean_absolute_error_over_cases_that_have_it():
    row = summarise_outcomes("steps", "all", [outcome(peer=-10.0, **{"|Habitat|": 4.0}), outcome(peer=20.0)])

    assert row.reference == "MAPE: peer 15.0, Habitat 4.0"


def test_where_nobody_else_predicted_nothing_is_said():
    assert summarise_outcomes("steps", "all", [outcome()]).reference == ""
