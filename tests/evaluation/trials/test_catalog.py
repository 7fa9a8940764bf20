"""The trials of an evaluation: how many of which, names that tell them apart, and their tasks."""

from __future__ import annotations

from collections import Counter

import pytest

from traincast_evaluation.trials.catalog import (
    BUILT_IN,
    CNN,
    RANDOM,
    SMALL_DLRMS,
    TRANSFORMER,
    Trial,
    draw_one_process_trials,
    draw_sharding_trials,
    draw_task_plans,
    draw_two_rank_trials,
    find_task,
    order_by_share,
)


def test_one_process_runs_every_random_dlrm_at_two_batch_sizes_and_every_small_model():
    trials = draw_one_process_trials()
    assert Counter(trial.group for trial in trials) == {RANDOM: 80, BUILT_IN: 6, TRANSFORMER: 8, CNN: 6}
    assert len({trial.key for trial in trials}) == 100


def test_two_ranks_run_dlrms_by_a_balanced_plan_and_transformers():
    trials = draw_two_rank_trials()
    assert Counter(trial.group for trial in trials) == {RANDOM: 20, TRANSFORMER: 4}
    assert all(trial.plan in draw_task_plans(find_task(trial)) for trial in trials if trial.group == RANDOM)


def test_shardings_are_at_least_five_for_every_task():
    trials = draw_sharding_trials()
    plans = Counter(trial.name for trial in trials)
    assert len(plans) == 20 and min(plans.values()) >= 5
    assert len({trial.key for trial in trials}) == len(trials)


def test_a_trial_survives_json_and_finds_its_task_again():
    trial = draw_one_process_trials(dlrms=3)[4]
    again = Trial.from_dict(trial.to_dict())
    assert again == trial and trial.batch_size in find_task(again).batch_sizes
    assert find_task(again).name == trial.name


@pytest.mark.parametrize("name", SMALL_DLRMS)
def test_built_in_dlrms_fit_into_a_gigabyte(name):
    config = find_task(Trial(group=BUILT_IN, name=name, batch_size=128)).config
    assert 4 * config.embedding_dim * sum(config.rows_per_table) < 1 << 30
    assert config.embedding == "bag" and len(config.access) == config.num_tables


def test_a_share_of_the_trials_is_seeded_and_mixed():
    trials = draw_one_process_trials()
    order = order_by_share(trials, seed=1)
    assert sorted(trial.key for trial in order) == sorted(trial.key for trial in trials)
    assert order == order_by_share(trials, seed=1) != order_by_share(trials, seed=2)
    assert len({trial.group for trial in order[:25]}) == 4
