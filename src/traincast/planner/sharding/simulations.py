"""Plans under the full walk, one by one or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic

import numpy as np

from traincast.models.placement.plan import Plan
from traincast.models.sharded_dlrm.marks import ScopeRole
from traincast.models.sharded_dlrm.step import build_sharded_dlrm
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.scored_plan import ScoredPlan
from traincast.planner.sharding.slots import Part
from traincast.planner.sharding.task import Task
from traincast.simulator.prediction.prediction import predict_step
from traincast.utils.errors import TraincastError
from traincast.utils.parallel.runner import Died, Job, Workers

TERMS = {
    "input exchange": (ScopeRole.ORDER, ScopeRole.BUCKET, ScopeRole.SIZES, ScopeRole.LENGTHS, ScopeRole.VALUES,
                       ScopeRole.ARRIVE),
    "lookup": (ScopeRole.LOOKUP, ScopeRole.BESIDE),
    "output exchange": (ScopeRole.OUT, ScopeRole.OUT_ACROSS, ScopeRole.JOIN, ScopeRole.BACK, ScopeRole.BACK_WITHIN),
    "update": (Part.SORT, Part.BACKWARD),
    "data-parallel tables": (Part.COPIES, ScopeRole.STEP),
    "dense gradients": (ScopeRole.DENSE,),
}  # fmt: skip
"""What a plan decides, by the roles of durations in the fast cost."""


def score_plan(task: Task, cost: FastCost, name: str, plan: Plan) -> ScoredPlan:
    """A plan under the full walk."""
    workload = build_sharded_dlrm(
        task.dense, task.tables, plan, batch_size=task.batch_size, gpus_per_node=task.gpus_per_node, name=name
    )
    stages = cost.assignment(plan).stages
    slots = cost.terms(stages)
    terms = {
        term: np.sum([seconds for slot, seconds in slots.items() if slot.role in roles], axis=0)
        for term, roles in TERMS.items()
        if any(slot.role in roles for slot in slots)
    }
    return ScoredPlan(
        name=name, plan=plan, prediction=predict_step(workload, task.platform), host_limit=task.limits.host,
        fast_seconds=float(cost.seconds(stages[None])[0]), terms=terms,
    )  # fmt: skip


class Simulations:
    """Full walks of plans for one task; `plans` are those whose options the fast cost must know. Sent to another
    process it is made anew there."""

    def __init__(self, task: Task, plans: Sequence[Plan]) -> None:
        self.task, self.plans = task, plans
        self.cost = FastCost(task, plans)

    def __reduce__(self) -> tuple[type[Simulations], tuple[Task, Sequence[Plan]]]:
        return Simulations, (self.task, self.plans)

    def walked(
        self, plans: Mapping[str, Plan], workers: Workers, progress: Callable[[float], None]
    ) -> tuple[list[ScoredPlan], list[float]]:
        """Plans under the full walk, equal ones simulated once; and the seconds that each simulation took."""
        names: dict[Plan, str] = {}
        for name, plan in plans.items():
            names.setdefault(plan, name)
        tasks = [(name, plan) for plan, name in names.items()]
        found: dict[int, tuple[ScoredPlan, float]] = {}

        def heard(number: int, outcome: tuple[ScoredPlan, float] | Died) -> None:
            if isinstance(outcome, Died):
                raise TraincastError(
                    f"a process that simulated plan '{tasks[number][0]}' died ({outcome.reason}); give fewer "
                    "`processes`"
                )
            found[number] = outcome
            progress(len(found) / len(tasks))

        scored = self.cost.scored
        workers.run_tasks(Job(prepare=_keep_simulations, given=self, work=_simulate_plan), tasks, heard)
        self.cost.scored = scored + len(tasks)  # some were counted elsewhere
        simulated = {plan: found[number][0] for number, (_, plan) in enumerate(tasks)}
        took = [found[number][1] for number in range(len(tasks))]
        return [replace(simulated[plan], name=name) for name, plan in plans.items()], took


def _keep_simulations(simulations: Simulations) -> Simulations:
    return simulations


def _simulate_plan(simulations: Simulations, named: tuple[str, Plan]) -> tuple[ScoredPlan, float]:
    began = monotonic()
    return score_plan(simulations.task, simulations.cost, *named), monotonic() - began
