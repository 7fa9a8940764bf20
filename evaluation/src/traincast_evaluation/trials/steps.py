"""The real step of a trial: the one that is captured and predicted is the one that runs. Needs torch."""

from __future__ import annotations

from collections.abc import Callable

from traincast_evaluation.trials.catalog import BUILT_IN, RANDOM, Trial, draw_task_plans, find_task
from traincast_evaluation.trials.dlrm import build_dlrm_step, make_one_rank_plan
from traincast_evaluation.trials.small_models import build_small_model_step

Step = Callable[[], object]


def make_trial_step(trial: Trial) -> Callable[..., Step]:
    """`make_step(batch_size, *, rank, world_size)` of a trial."""
    if trial.group not in (RANDOM, BUILT_IN):
        return build_small_model_step(trial.name)
    task = find_task(trial)
    plan = draw_task_plans(task)[trial.plan] if trial.ranks > 1 else make_one_rank_plan(task.config)
    return build_dlrm_step(task, plan)
