"""The workload of a trial: its own step captured, and which rows its lookups want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from traincast.capturing.distributed import capture_distributed
from traincast.capturing.step import capture_step
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.placement.plan import Plan
from traincast_evaluation.trials.catalog import BUILT_IN, RANDOM, Trial, draw_task_plans, find_task
from traincast_evaluation.trials.dlrm import Division, make_one_rank_plan
from traincast_evaluation.trials.steps import make_trial_step


@dataclass(frozen=True, slots=True)
class TrialWorkload:
    """A captured trial; `access[r]` says which rows each lookup of rank r wants, in the order in which it makes them
    (as `embeddings.access.parse_access` reads it)."""

    workload: Workload
    access: tuple[tuple[str, ...], ...]

    def program(self, rank: int) -> Program:
        """What a rank runs."""
        return self.workload.programs[self.workload.ranks[rank]]


def build_trial_workload(trial: Trial) -> TrialWorkload:
    """The step of a trial, at its size only. Nothing is run: tensors have no data. Needs torch."""
    make_step = make_trial_step(trial)
    sizes: dict[str, Any] = {"batch_size": trial.batch_size, "name": trial.key, "rebatch": False}
    if trial.ranks > 1:
        workload = capture_distributed(make_step, world_size=trial.ranks, runs_on="cpu", **sizes)
    else:
        workload = capture_step(make_step, runs_on="cpu", **sizes)
    return TrialWorkload(workload, tuple(_list_trial_access(trial, rank) for rank in range(trial.ranks)))


def _list_trial_access(trial: Trial, rank: int) -> tuple[str, ...]:
    if trial.group not in (RANDOM, BUILT_IN):
        return ()
    task = find_task(trial)
    plan = draw_task_plans(task)[trial.plan] if trial.ranks > 1 else make_one_rank_plan(task.config)
    return list_rank_access(task.config, plan, rank)


def list_rank_access(config: DlrmConfig, plan: Plan, rank: int) -> tuple[str, ...]:
    """Which rows the lookups of a rank want under a plan, in the order in which it makes them."""
    division = Division.of(plan, config, rank)
    shards = (*division.exchanged[rank], *division.by_rows)
    return tuple(config.access[table] for table in (*(shard.table for shard in shards), *division.copied))
