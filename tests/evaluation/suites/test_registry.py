"""The registry of suites: what it names exists, and evaluating one gives a result."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import traincast_evaluation
from tests.evaluation.suites.folders import DLRM, write_rows
from traincast.app.cli.main import main
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import compute_error_row
from traincast_evaluation.suites import registry
from traincast_evaluation.suites.cases import Compared, compare
from traincast_evaluation.suites.registry import SUITES, Suite, evaluate


@pytest.fixture
def folder(tmp_path):
    return write_rows(tmp_path, "dlrm_single_gpu", DLRM, {**DLRM, "batch": "1024", "iteration_ms": "6.0"})


@pytest.mark.parametrize("name", SUITES)
def test_every_function_that_the_registry_names_is_there(name):
    suite = SUITES[name]
    parameters = {
        suite.cases: ["data"], suite.table: ["data", "progress"], suite.notes: [],
        suite.summary: ["suite", "outcomes", "data"], suite.here: ["folder", "options", "progress"],
    }  # fmt: skip
    assert sum(map(bool, (suite.cases, suite.table, suite.here))) == 1
    for place, names in parameters.items():
        if place:
            assert list(inspect.signature(registry._import_function(place)).parameters)[: len(names)] == names


def test_names_are_offered_in_order():
    assert list(SUITES) == sorted(SUITES)


def test_an_unknown_suite_is_named_with_the_nearest(tmp_path):
    with pytest.raises(TraincastError, match=r"unknown suite 'kernel'\. Did you mean kernels"):
        evaluate("kernel", tmp_path)


@pytest.mark.parametrize("suite", ["here", "sharding"])
def test_a_machine_that_was_not_measured_is_told_what_to_do(suite, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    with pytest.raises(TraincastError, match=r"no profile '.*here.toml'; measure this machine with 'traincast bench'"):
        traincast_evaluation.evaluate(suite)
    with pytest.raises(TraincastError, match="own profile; leave out `roofline_only`"):
        traincast_evaluation.evaluate(suite, roofline_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0.0}, "`minutes=0`; give a number above 0, up to 1440"),
        ({"minutes": float("nan")}, "`minutes=nan`; give a number"),
        ({"seed": -1}, "seed -1; give an integer"),
        ({"tasks": 0}, "0 random DLRMs; give an integer"),
    ],
)
def test_senseless_options_of_a_measuring_suite_are_refused(options, message, tmp_path):
    with pytest.raises(TraincastError, match=message):
        traincast_evaluation.evaluate("here", data=tmp_path, **options)


def test_options_of_this_machine_are_refused_elsewhere(tmp_path):
    with pytest.raises(TraincastError, match="`minutes` is for suites that measure this machine; leave it out"):
        traincast_evaluation.evaluate("dlrm", data=tmp_path, minutes=1)


def test_tables_of_kernels_know_no_roofline(tmp_path):
    with pytest.raises(TraincastError, match="leave out `roofline_only`"):
        evaluate("kernels", tmp_path, roofline_only=True)


def test_a_suite_of_steps_has_cases_and_a_summary(folder):
    heard = []

    result = evaluate("dlrm", folder, progress=heard.append)

    assert heard == [0.5, 1.0]
    assert [row.group for row in result.summary] == ["all: step", "all: device active"]
    assert [outcome.case.name for outcome in result.outcomes] == ["DLRM_default 512", "DLRM_default 1024"]
    assert result.mape == result.summary[0].mape
    assert result.notes == ()


def test_a_result_is_plain_data_records_and_a_headline(folder):
    result = evaluate("dlrm", folder)

    document = result.to_dict()
    assert document["summary"][0]["n"] == 2
    case = document["cases"][0]
    assert (case["case"], case["measured_ms"]) == ("DLRM_default 512", 5.0)
    assert case["interval_ms"][0] < case["predicted_ms"] < case["interval_ms"][1]
    assert case["covered"] == (case["interval_ms"][0] <= 5.0 <= case["interval_ms"][1])
    assert case["others_error_percent"] == {"reference": -6.9, "kernels only": -53.7}
    assert [len(rows) for rows in result.records().values()] == [2, 2]
    assert result.headline().splitlines()[:2] == ["dlrm", f"all: step: MAPE {result.mape:.2f} %, n 2"]


def test_a_suite_of_tables_has_rows_and_nothing_else(tmp_path, monkeypatch):
    rows = [compute_error_row("made up", "all", [1.1], [1.0], ["a"])]
    monkeypatch.setitem(SUITES, "made-up", Suite(table="made_up:rows"))
    monkeypatch.setattr(registry, "_import_function", lambda place: lambda data, progress: rows)

    result = evaluate("made-up", tmp_path)

    assert (result.summary, result.outcomes) == (tuple(rows), ())
    assert result.to_dict()["cases"] == []


def test_cases_of_a_table_are_plain_data_with_the_keys_of_steps(tmp_path, monkeypatch):
    cases = [
        Compared(device="a100", name="one", measured=1.0, predicted=1.1, interval=(1.05, 1.2)),
        Compared(device="a100", name="two", measured=2.0, predicted=1.9, interval=(1.5, 2.5)),
    ]
    alone = compare("made up", "without", [Compared(device="h100", name="x", measured=1, predicted=1, interval=None)])
    rows = [compare("made up", "all", cases), alone]
    monkeypatch.setitem(SUITES, "made-up", Suite(table="made_up:rows"))
    monkeypatch.setattr(registry, "_import_function", lambda place: lambda data, progress: rows)

    document = evaluate("made-up", tmp_path).to_dict()

    assert [(row["n"], row["covered"]) for row in document["summary"]] == [(2, 50.0), (1, None)]
    assert "cases" not in document["summary"][0]
    first, _, without = document["cases"]
    assert first == {
        "device": "a100", "case": "all: one", "measured_ms": 1000.0, "predicted_ms": 1100.0,
        "interval_ms": [1050.0, 1200.0], "covered": False, "error_percent": pytest.approx(10.0),
    }  # fmt: skip
    assert (without["interval_ms"], without["covered"]) == ([], None)
    assert document["summary"][0]["half_width"] == pytest.approx(np.median([50 * 0.15 / 1.1, 50 * 1.0 / 1.9]))


def test_the_command_line_offers_every_suite(capsys, tmp_path):
    assert main(["evaluate", "kernels", "--data", str(tmp_path), "--max-mape", "5"]) == 2
    assert "--max-mape" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert all(name in text for name in SUITES)


@pytest.mark.parametrize(("limit", "code"), [("1000", 0), ("0.001", 1)])
def test_a_limit_turns_a_suite_of_steps_into_a_check(folder, capsys, limit, code):
    assert main(["evaluate", "dlrm", "--data", str(folder), "--max-mape", limit]) == code
    assert "inside the 90 % interval" in capsys.readouterr().out
