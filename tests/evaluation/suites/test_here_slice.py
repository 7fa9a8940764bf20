"""A slice of the whole method on this machine: predicted from a profile, written down, run, compared.

What is tested is that every part fits the next, so the bounds are loose, nothing is waited for until this machine is
calm, and what is measured is counted, not timed.
"""

from __future__ import annotations

import json
from itertools import islice

import pytest

pytest.importorskip("torch")

import traincast
import traincast_evaluation
from tests.costs.cpu.made_up import IDENTITY, exchange_samples, samples
from traincast.calibration import here as question
from traincast.calibration.bench import parts
from traincast.calibration.bench.plans import plan_benchmarks
from traincast.calibration.fit import fit_profile
from traincast.costs.cpu.profile import save_profile
from traincast_evaluation.suites import here, trial_runs
from traincast_evaluation.suites.trial_runs import ISOLATED
from traincast_evaluation.trials.catalog import CNN, Trial, draw_one_process_trials

SLICE = [draw_one_process_trials(dlrms=3)[4], Trial(group=CNN, name="plain-mini", batch_size=2)]
TOGETHER = [Trial(group=CNN, name="plain-mini", batch_size=2, ranks=2)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Each step is measured once, for a moment, however disturbed it is."""
    monkeypatch.setitem(here.VISITS, "here", 1)
    monkeypatch.setattr(trial_runs, "_STEP_SECONDS", 0.1)
    monkeypatch.setattr(trial_runs, "CALM", 1e9)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A home with the profile of a machine whose speed is known."""
    folder = tmp_path_factory.mktemp("home")
    collectives = [one for kind in ("all_reduce", "broadcast") for one in exchange_samples(kind)]
    profile, _ = fit_profile([*samples(200), *collectives], IDENTITY, "busy")
    save_profile(profile, folder / "here.toml")
    return folder


def test_steps_are_predicted_written_down_run_and_compared(machine, monkeypatch):
    monkeypatch.setattr(here, "draw_one_process_trials", lambda **_: SLICE)
    monkeypatch.setattr(here, "draw_two_rank_trials", lambda **_: TOGETHER)

    result = traincast_evaluation.evaluate("here", data=machine, on=str(machine / "here.toml"))

    assert {outcome.case.name for outcome in result.outcomes} == {trial.key for trial in (*SLICE, *TOGETHER)}
    for outcome in result.outcomes:
        assert 0.02 < outcome.predicted_ms / outcome.case.measured_ms < 50
        assert outcome.low_ms < outcome.predicted_ms < outcome.high_ms
        assert outcome.case.spread_percent >= 0
        assert (ISOLATED in outcome.case.others) == ("2 ranks" not in outcome.case.group)
    (predicted,) = machine.glob("here-*-predicted.json")
    (measured,) = machine.glob("here-*-measured.jsonl")
    assert predicted.stat().st_mtime_ns <= measured.stat().st_mtime_ns
    assert len(json.loads(predicted.read_text())["predictions"]) == 3
    assert len(measured.read_text().splitlines()) == 3
    document = result.to_dict()
    assert document["summary"][0]["group"] == "all: step"
    assert all(row["covered"] is not None and "repeats spread" in row["reference"] for row in document["summary"])

    again = traincast_evaluation.evaluate("here", data=machine, on=str(machine / "here.toml"))  # all is there already
    assert [o.case.measured_ms for o in again.outcomes] == [o.case.measured_ms for o in result.outcomes]


def test_a_little_of_everything_measured_here_tells_how_long_this_machines_steps_take(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    monkeypatch.setattr(here, "draw_one_process_trials", lambda **_: SLICE)
    monkeypatch.setattr(here, "draw_two_rank_trials", lambda **_: [])
    monkeypatch.setattr(question, "_choose_plan", lambda _, seed: islice(plan_benchmarks(seed), 40))
    for most, number in {"_MOST_STEPS": 2, "_MOST_COPIES": 3, "_MOST_EXCHANGES": 2}.items():
        monkeypatch.setattr(parts, most, number)
    monkeypatch.setattr(parts, "_TOGETHER_SECONDS", 0.09 * 24 * 3600)  # one of those steps on two ranks
    benched = traincast.bench(budget="24h")
    traincast.fit_store(benched.store, clock="busy")

    result = traincast_evaluation.evaluate("here", data=tmp_path)

    assert len(result.outcomes) == len(SLICE)
    for outcome in result.outcomes:
        assert 0.02 < outcome.predicted_ms / outcome.case.measured_ms < 50
