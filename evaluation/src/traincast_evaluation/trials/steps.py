"""The real step of a trial: the one that is captured and predicted is the one that runs. Needs torch."""

from __future__ import annotations

from collections.abc import Callable

from traincast_evaluation.trials.catalog import BUILT_IN, RANDOM, Trial, task_of, task_plans
from traincast_evaluation.trials.dlrm import dlrm_step, one_rank_plan
from traincast_evaluation.trials.small_models import small_model_step

Step = Callable[[], object]


def make_step_of(trial: Trial) -> Callable[..., Step]:
    """`make_step(batch_size, *, rank, world_size)` of a trial."""
    if trial.group not in (RANDOM, BUILT_IN):
        return small_model_step(trial.name)
    task = task_of(trial)
    plan = task_plans(task)[trial.plan] if trial.ranks > 1 else one_rank_plan(task.config)
    return dlrm_step(task, plan)
