"""Accuracy tables, exactly as rendered."""

from __future__ import annotations

from traincast.simulator.scenario.scenario import Scenario
from traincast_evaluation.report import format_cases, format_evaluation, format_summary
from traincast_evaluation.suites.cases import Case, Outcome, summarise
from traincast_evaluation.suites.registry import Evaluation


def outcome(name, measured, predicted, low, high):
    case = Case(
        name=name,
        group="V100",
        question=Scenario(workload="dlrm-default", on="v100"),
        measured_ms=measured,
        others={"peer": -20.0},
    )
    return Outcome(case=case, predicted_ms=predicted, low_ms=low, high_ms=high, active_ms=1.0)


OUTCOMES = [outcome("small", 10.0, 11.0, 9.0, 13.0), outcome("large", 100.0, 80.0, 70.0, 90.0)]


def test_cases_name_errors_and_coverage():
    lines = format_cases(OUTCOMES).splitlines()

    assert lines[2].split() == ["V100", "small", "10.00", "11.00", "9.00", "-", "13.00", "+10.0", "-20.0"]
    assert lines[-1] == "inside the 90 % interval: 1 of 2"


def test_summary_has_every_measure():
    header, _, row = format_summary(summarise("steps", OUTCOMES)).splitlines()

    assert header.split()[:8] == ["suite", "group", "n", "GMAE", "MAPE", "median", "worst", "bias"]
    assert row.split()[:9] == ["steps", "all:", "step", "2", "14.14", "15.00", "15.00", "-20.0", "-5.0"]
    assert "MAPE: peer 20.0" in row


def evaluation(outcomes, notes=()):
    return Evaluation(suite="steps", summary=tuple(summarise("steps", OUTCOMES)), outcomes=outcomes, notes=notes)


def test_the_page_has_cases_summary_and_notes():
    page = format_evaluation(evaluation(tuple(OUTCOMES), ("torch is missing",)))

    assert page == "\n".join(
        [format_cases(OUTCOMES), "", format_summary(summarise("steps", OUTCOMES)), "torch is missing"]
    )


def test_without_cases_the_page_is_the_summary():
    assert format_evaluation(evaluation(())) == format_summary(summarise("steps", OUTCOMES))


def test_json_keeps_every_case():
    document = evaluation(tuple(OUTCOMES)).to_dict()

    assert [case["covered"] for case in document["cases"]] == [True, False]
    assert document["summary"][0]["n"] == 2
