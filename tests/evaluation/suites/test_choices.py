"""Choices between shardings: which were right, by how much the others were not."""

from __future__ import annotations

import pytest

from traincast.simulator.scenario.scenario import Scenario
from traincast_evaluation.suites.cases import Case, Outcome
from traincast_evaluation.suites.choices import count_fixed_choice_right, make_choices, write_choice_notes
from traincast_evaluation.suites.here import group_by_task
from traincast_evaluation.trials.catalog import draw_sharding_trials


def outcome(predicted, measured, spread=1.0, name="step"):
    case = Case(
        name=name, group="g", question=Scenario(workload="w", on="here"), measured_ms=measured, spread_percent=spread
    )
    return Outcome(case=case, predicted_ms=predicted, low_ms=0.0, high_ms=1e9, active_ms=predicted)


TASKS = {
    "hit": {"a": outcome(1.0, 10.0), "b": outcome(2.0, 15.0)},
    "near": {"a": outcome(2.0, 10.0, spread=4.0), "b": outcome(1.0, 10.9)},
    "miss": {"a": outcome(2.0, 10.0), "b": outcome(1.0, 12.5, spread=3.0)},
}


def test_a_choice_is_right_when_it_is_the_best_or_within_a_tenth():
    made = {choice.task: choice for choice in make_choices(TASKS)}
    assert [made[task].right for task in ("hit", "near", "miss")] == [True, True, False]
    assert (made["near"].chosen, made["near"].best) == ("b", "a")
    assert made["near"].loss_percent == pytest.approx(9.0)
    assert made["miss"].loss_percent == pytest.approx(25.0)
    assert made["near"].spread_percent == 4.0
    assert made["hit"].slowest_percent == pytest.approx(50.0)
    assert made["hit"].to_dict()["right"] is True


def test_always_taking_one_candidate_is_the_baseline():
    assert count_fixed_choice_right(TASKS, "a") == 3
    assert count_fixed_choice_right(TASKS, "b") == 1
    assert count_fixed_choice_right(TASKS, "c") == 0


def test_notes_count_right_choices_and_name_the_worst():
    first, *others = write_choice_notes(make_choices(TASKS), TASKS, ("a",))
    assert "in 2 of 3 tasks" in first and "costs 25.0 % over the best (miss: b for a" in first
    assert others == ["always 'a': right in 3 of 3"]
    assert write_choice_notes([], {}, ()) == ["no task has two measured candidates: give more minutes"]


def test_a_task_counts_only_when_all_its_candidates_were_measured():
    trials = draw_sharding_trials(tasks=2)
    first = trials[0].name
    complete = [outcome(1.0, 1.0, name=trial.key) for trial in trials if trial.name == first]
    tasks = group_by_task(trials, [*complete, outcome(1.0, 1.0, name=trials[-1].key)])
    assert list(tasks) == [first] and len(tasks[first]) == len(complete)
