"""Trials predicted, written down, run and compared: with ranks that only pretend to measure."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.report import format_cases
from traincast_evaluation.suites import trial_runs
from traincast_evaluation.suites.here_files import Predicted
from traincast_evaluation.suites.trial_runs import ISOLATED, Runs, name_trial_group
from traincast_evaluation.trials.catalog import Trial, draw_one_process_trials, draw_two_rank_trials

TRIALS = [*draw_one_process_trials(dlrms=1)[:3], *draw_two_rank_trials(dlrms=1)[:1]]


class Machine:
    """Pretends to run jobs; remembers which. Steps take three references, their ops alone two."""

    def __init__(self, fail_after=None):
        self.ran, self.fail_after = [], fail_after

    def __call__(self, jobs, ranks, *, each, seconds, module):
        for job in jobs:
            if self.fail_after is not None and len(self.ran) == self.fail_after:
                raise KeyboardInterrupt
            assert Trial.from_dict(job["trial"]).ranks == ranks and seconds > 0
            self.ran.append(Trial.from_dict(job["trial"]).key)
            times = {"step": [6.0, 6.0, 6.6], "busy": [3.0] * 3, "reference": [2.0] * 3, "reference_busy": [0.5] * 3}
            each({**job, **times, **({"isolated": 2.0} if job["isolated"] else {})})


def runs(folder, **changes):
    given = {"predict": lambda trial: Predicted(1.65, 1.0, 2.0), "clock": "wall", **changes}
    return Runs(name="here", folder=folder, trials=TRIALS, basis="b", nominal=0.5, **given)


@pytest.fixture
def machine(monkeypatch):
    pretended = Machine()
    monkeypatch.setattr(trial_runs, "run_ranks", pretended)
    return pretended


def test_outcomes_are_ratios_to_the_reference_in_nominal_seconds(tmp_path, machine):
    heard = []
    outcomes, left_out = runs(tmp_path).outcomes(heard.append)
    assert not left_out and sorted(machine.ran) == sorted(3 * [trial.key for trial in TRIALS])
    first = outcomes[0]
    assert first.case.measured_ms == pytest.approx(1500.0)
    assert first.error_percent == pytest.approx(10.0) and first.covered
    assert first.case.others == {ISOLATED: pytest.approx(100 * (2.0 / 3.0 - 1))}
    assert first.case.spread_percent == pytest.approx(0.0)
    assert heard[-1] == pytest.approx(1.0) and heard == sorted(heard)
    assert outcomes[-1].case.group == "random DLRM, 2 ranks" and outcomes[-1].case.others == {}


def test_a_step_is_visited_again_after_all_others(tmp_path, machine):
    runs(tmp_path, visits=2).outcomes(lambda _: None)
    assert len(machine.ran) == 8 and machine.ran[:4] == machine.ran[4:] and len(set(machine.ran)) == 4
    assert {one.visits for one in runs(tmp_path).record.measurements().values()} == {2}


def test_processor_time_counts_for_one_process_only(tmp_path, machine):
    outcomes, _ = runs(tmp_path, clock="busy").outcomes(lambda _: None)
    assert outcomes[0].case.measured_ms == pytest.approx(3000.0)
    assert outcomes[-1].case.measured_ms == pytest.approx(1500.0)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    first = Machine(fail_after=2)
    monkeypatch.setattr(trial_runs, "run_ranks", first)
    with pytest.raises(KeyboardInterrupt):
        runs(tmp_path).outcomes(lambda _: None)
    second = Machine()
    monkeypatch.setattr(trial_runs, "run_ranks", second)

    def not_again(trial):
        raise AssertionError("was predicted before the first measurement")

    outcomes, _ = runs(tmp_path, predict=not_again).outcomes(lambda _: None)
    assert len(first.ran) == 2 and len(second.ran) == 3 * 4 - 2 and len(outcomes) == 4


def test_a_step_that_cannot_be_predicted_is_left_out_with_its_reason(tmp_path, machine):
    def predict(trial):
        if trial.ranks > 1:
            raise TraincastError("gloo was not measured")
        return Predicted(1.0, 1.0, 1.0)

    outcomes, left_out = runs(tmp_path, predict=predict).outcomes(lambda _: None)
    assert len(outcomes) == 3 and TRIALS[-1].key not in machine.ran
    assert [(row.name, row.reason) for row in left_out] == [(TRIALS[-1].key, "gloo was not measured")]


def test_groups_tell_ranks_apart():
    assert [name_trial_group(trial) for trial in (TRIALS[0], TRIALS[-1])] == ["random DLRM", "random DLRM, 2 ranks"]


def test_spread_is_a_robust_deviation():
    trial, times = TRIALS[0], (0.9, 1.0, 1.1, 1.0, 5.0)
    measured = trial_runs.Measured(times, (1.0,) * 5, times, (1.0,) * 5)
    found = trial_runs.make_trial_outcome(trial, Predicted(1.0, 0.9, 1.1), measured, nominal=1.0, clock="wall")
    assert found.case.spread_percent == pytest.approx(100 * 1.4826 * np.median([0.1, 0.0, 0.1, 0.0, 4.0]))


def test_repetitions_beside_a_slow_reference_do_not_count():
    steps, beside = (3.0, 3.1, 1.0, 1.1, 0.9), (1.5, 1.5, 1.0, 1.0, 1.0)
    measured = trial_runs.Measured(steps, beside, steps, beside)
    found = trial_runs.make_trial_outcome(TRIALS[0], Predicted(1.0, 0.9, 1.1), measured, nominal=1.0, clock="busy")
    assert found.case.measured_ms == pytest.approx(1000.0)
    never = trial_runs.Measured(steps, (2.0,) * 5, steps, (2.0,) * 5)
    found = trial_runs.make_trial_outcome(TRIALS[0], Predicted(1.0, 0.9, 1.1), never, nominal=1.0, clock="busy")
    assert found.case.measured_ms == pytest.approx(550.0), "a machine that is never calm is taken as it is"


def test_the_spread_of_repeats_stands_beside_every_error(tmp_path, machine):
    outcomes, _ = runs(tmp_path).outcomes(lambda _: None)
    header, _, first, *_ = format_cases(outcomes).splitlines()
    assert header.split()[-4:] == ["active", "isolated", "ops", "summed"] and "spread" in header
    assert first.split()[-3:] == ["+10.0", "0.0", "-33.3"]
