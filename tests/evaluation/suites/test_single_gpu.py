"""Whole steps against published measurements: bounds that a regression would break, and tables that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.app.cli.main import main
from traincast_evaluation.suites.cases import run_cases, summarise
from traincast_evaluation.suites.single_gpu import cnn_cases, dlrm_cases, transformer_cases


def test_dlrm_steps(shared_data):
    outcomes = run_cases(dlrm_cases(shared_data))

    step, active = summarise("dlrm", outcomes)
    assert step.n == 12
    assert step.gmae < 5.0
    assert step.mape < 8.0  # the reference model, which took its overheads from these very runs, is at 11
    assert active.gmae < 4.0


def test_dlrm_steps_with_rooflines_only(shared_data):
    step = summarise("dlrm", run_cases(dlrm_cases(shared_data), roofline_only=True))[0]

    assert step.mape < 25.0  # kernels alone are at about 42


def test_cnn_steps(shared_data):
    step = summarise("cnn", run_cases(cnn_cases(shared_data)))[0]

    assert step.n == 6
    assert step.median < 15.0


def test_the_clock_of_a_case_can_stop_before_an_op(shared_data):
    case = cnn_cases(shared_data)[0]

    stopped, whole = run_cases([case, replace(case, stops_at="")])

    assert 0.9 * whole.predicted_ms < stopped.predicted_ms < whole.predicted_ms
    assert stopped.high_ms / stopped.predicted_ms == pytest.approx(whole.high_ms / whole.predicted_ms)


def test_transformer_steps_beat_neusight_overall(shared_data):
    cases = [case for case in transformer_cases(shared_data) if "NeuSight" in case.others][::3]
    outcomes = run_cases(cases)

    step = summarise("transformers", outcomes)[0]
    neusight = sum(abs(o.case.others["NeuSight"]) for o in outcomes) / len(outcomes)
    assert step.mape < neusight


def test_compiled_transformers_are_predicted_better_than_by_neusight(shared_data):
    cases = transformer_cases(shared_data)
    compiled = [case for case in cases if case.question.compiled]
    assert (len(cases), len(compiled)) == (44, 4)
    for outcome in run_cases(compiled[1:3]):
        assert abs(outcome.error_percent) < abs(outcome.case.others["NeuSight"])


@pytest.mark.parametrize(("limit", "code"), [("25", 0), ("0.1", 1)])
def test_a_limit_makes_evaluate_a_check(shared_data, capsys, limit, code):
    assert main(["evaluate", "dlrm", "--data", str(shared_data), "--max-mape", limit]) == code
    assert "DLRM_MLPerf 512" in capsys.readouterr().out
