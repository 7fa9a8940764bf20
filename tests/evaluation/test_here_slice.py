"""A slice of the whole method on this machine: predicted from a profile, written down, run, compared.

The bounds are loose: the profile is of a made-up machine, and others may be using this one. What is tested is that
every part fits the next.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import traincast
from tests.calibration.made_up import IDENTITY, exchange_samples, samples
from traincast.calibration.fit import fit_profile
from traincast.calibration.profile import save_profile
from traincast.evaluation import here
from traincast.evaluation.trial_runs import ISOLATED
from traincast.trials.catalog import CNN, Trial, one_process_trials

SLICE = [one_process_trials(dlrms=3)[4], Trial(group=CNN, name="plain-mini", batch_size=2)]
TOGETHER = [Trial(group=CNN, name="plain-mini", batch_size=2, ranks=2)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A home with the profile of a machine whose speed is known."""
    folder = tmp_path_factory.mktemp("home")
    collectives = [one for kind in ("all_reduce", "broadcast") for one in exchange_samples(kind)]
    profile, _ = fit_profile([*samples(200), *collectives], IDENTITY, "busy")
    save_profile(profile, folder / "here.toml")
    return folder


def test_steps_are_predicted_written_down_run_and_compared(machine, monkeypatch):
    monkeypatch.setattr(here, "one_process_trials", lambda **_: SLICE)
    monkeypatch.setattr(here, "two_rank_trials", lambda **_: TOGETHER)
    monkeypatch.setitem(here.VISITS, "here", 2)

    result = traincast.evaluate("here", data=machine, on=str(machine / "here.toml"), minutes=3)

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
    assert len(measured.read_text().splitlines()) == 2 * 3
    document = result.to_dict()
    assert document["summary"][0]["group"] == "all: step"
    assert all(row["covered"] is not None and "repeats spread" in row["reference"] for row in document["summary"])

    again = traincast.evaluate("here", data=machine, on=str(machine / "here.toml"), minutes=3)  # all is there already
    assert [o.case.measured_ms for o in again.outcomes] == [o.case.measured_ms for o in result.outcomes]


def test_a_quarter_minute_of_calibration_tells_how_long_this_machines_steps_take(tmp_path, monkeypatch):
    """The whole method on the machine that runs the tests: the bound is loose, since others run beside it."""
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    monkeypatch.setattr(here, "one_process_trials", lambda **_: SLICE)
    monkeypatch.setattr(here, "two_rank_trials", lambda **_: [])
    monkeypatch.setitem(here.VISITS, "here", 1)
    benched = traincast.bench(budget="15s")
    traincast.fit_store(benched.store, clock="busy")

    result = traincast.evaluate("here", data=tmp_path, minutes=2)

    assert len(result.outcomes) == len(SLICE)
    for outcome in result.outcomes:
        assert 0.1 < outcome.predicted_ms / outcome.case.measured_ms < 10
