"""Every step that `evaluate here` and `evaluate sharding` run, by what it is and its size; no torch needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from traincast.models.dlrm.config import STUDY_DLRMS, DlrmConfig
from traincast.models.placement.plan import Plan
from traincast.models.sharded_dlrm.step import make_dlrm_tables
from traincast_evaluation.trials.plans import BALANCED, draw_candidate_plans
from traincast_evaluation.trials.tasks import DlrmTask, draw_dlrms

RANDOM, BUILT_IN, TRANSFORMER, CNN = "random DLRM", "built-in DLRM", "Transformer", "CNN"
PLAN_SEED = 0
TRANSFORMERS = ("bert-mini", "bert-small", "gpt2-mini", "gpt2-small")
CNNS = ("resnet-mini", "vgg-mini", "plain-mini")
SMALL_DLRMS: dict[str, DlrmConfig] = {
    # rows and lookups an eighth or less of the built-in ones, so that a step is tens of milliseconds of one thread
    "dlrm-default": replace(
        STUDY_DLRMS["dlrm-default"], rows_per_table=(100_000,) * 8, lookups_per_table=(12,) * 8, loss="bce"
    ),
    "dlrm-mlperf": replace(
        STUDY_DLRMS["dlrm-mlperf"],
        rows_per_table=tuple(min(rows, 200_000) for rows in STUDY_DLRMS["dlrm-mlperf"].rows_per_table),
    ),
    "dlrm-ddp": STUDY_DLRMS["dlrm-ddp"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One step to predict and to run. `number` counts the random DLRMs of `seed`; `plan` names the sharding of a DLRM
    on several ranks ("" on one)."""

    group: str
    name: str
    batch_size: int
    ranks: int = 1
    seed: int = 0
    number: int = -1
    plan: str = ""

    @property
    def key(self) -> str:
        """A name that no other trial has."""
        plan = f", {self.plan}" if self.plan else ""
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.name}, batch {self.batch_size}{ranks}{plan}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Trial:
        """A trial from its fields."""
        return Trial(**fields)


def draw_one_process_trials(*, dlrms: int = 40, seed: int = 0) -> list[Trial]:
    """What one process runs: random DLRMs at two batch sizes, built-in ones scaled down, Transformers, CNNs."""
    trials = [
        Trial(group=RANDOM, name=task.name, batch_size=size, seed=seed, number=number)
        for number, task in enumerate(draw_dlrms(dlrms, seed=seed))
        for size in task.batch_sizes
    ]
    for group, names, sizes in (
        (BUILT_IN, tuple(SMALL_DLRMS), (128, 256)),
        (TRANSFORMER, TRANSFORMERS, (2, 4)),
        (CNN, CNNS, (4, 8)),
    ):
        trials += [Trial(group=group, name=name, batch_size=size) for name in names for size in sizes]
    return trials


def draw_two_rank_trials(*, dlrms: int = 20, seed: int = 0) -> list[Trial]:
    """What two ranks run: hybrid-parallel random DLRMs and Transformers under DDP."""
    tasks = draw_dlrms(dlrms, seed=seed, ranks=2, batches=1)
    trials = [
        Trial(group=RANDOM, name=task.name, batch_size=task.batch_sizes[0], ranks=2, seed=seed, number=number,
              plan=BALANCED)
        for number, task in enumerate(tasks)
    ]  # fmt: skip
    return trials + [Trial(group=TRANSFORMER, name=name, batch_size=2, ranks=2) for name in TRANSFORMERS]


def draw_sharding_trials(*, tasks: int = 20, seed: int = 0) -> list[Trial]:
    """Every candidate sharding of every task, task by task."""
    return [
        Trial(group=RANDOM, name=task.name, batch_size=task.batch_sizes[0], ranks=2, seed=seed, number=number,
              plan=plan)
        for number, task in enumerate(draw_dlrms(tasks, seed=seed, ranks=2, batches=1))
        for plan in draw_task_plans(task)
    ]  # fmt: skip


def find_task(trial: Trial) -> DlrmTask:
    """The DLRM of a trial, random or built in."""
    if trial.group == RANDOM:
        batches = 2 if trial.ranks == 1 else 1
        return draw_dlrms(trial.number + 1, seed=trial.seed, ranks=trial.ranks, batches=batches)[-1]
    config = SMALL_DLRMS[trial.name]
    config = replace(config, embedding="bag", index_dtype="int64", access=("uniform",) * config.num_tables)
    return DlrmTask(name=trial.name, config=config, batch_sizes=(trial.batch_size,), ranks=trial.ranks, seed=0)


def draw_task_plans(task: DlrmTask) -> dict[str, Plan]:
    """The candidate shardings of a task by name; the balanced one is always among them."""
    return draw_candidate_plans(make_dlrm_tables(task.config), task.ranks, seed=PLAN_SEED)


def order_by_share(trials: Sequence[Trial], seed: int) -> list[Trial]:
    """The trials in a seeded order, so that any first part of them is a fair share."""
    import numpy as np

    return [trials[number] for number in np.random.default_rng(seed).permutation(len(trials))]
