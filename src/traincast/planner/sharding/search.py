"""The search for a plan from names and files: local search on the fast cost, finalists and baselines on the full
simulation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from traincast.hardware.platform import add_default_links, load_platform
from traincast.ir.workload import TABLES, Workload
from traincast.models.embeddings.table import Table
from traincast.models.placement.options import make_greedy_plans
from traincast.models.placement.plan import Plan, check_plan, load_plans, simplify_plan
from traincast.models.sharded_dlrm.captured import CapturedDense
from traincast.models.sharded_dlrm.layout import ScopeRole
from traincast.models.sharded_dlrm.step import build_sharded_dlrm
from traincast.planner.sharding.assignment import Assignment
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.local_search import Effort, list_used_groups, search_locally
from traincast.planner.sharding.max_plus import Part
from traincast.planner.sharding.result import ScoredPlan, ShardingResult, Task, explain_host_memory, make_task
from traincast.planner.sharding.thorough import search_thoroughly
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.tables import DEFAULT_BATCH, load_dense, load_recommender, retype_tables
from traincast.utils.errors import INSTALL_TORCHREC, TraincastError
from traincast.utils.files.reading import read_document
from traincast.utils.parallel.runner import SEARCH, Died, Job, Workers

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
    """A plan under the full simulation."""
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
    """Full simulations of plans for one task; `plans` are those whose options the fast cost must know. Sent to another
    process it is made anew there."""

    def __init__(self, task: Task, plans: Sequence[Plan]) -> None:
        self.task, self.plans = task, plans
        self.cost = FastCost(task, plans)

    def __reduce__(self) -> tuple[type[Simulations], tuple[Task, Sequence[Plan]]]:
        return Simulations, (self.task, self.plans)

    def simulate(
        self, plans: Mapping[str, Plan], workers: Workers, progress: Callable[[float], None]
    ) -> tuple[list[ScoredPlan], list[float]]:
        """Plans under the full simulation, equal ones simulated once; and the seconds that each simulation took."""
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


FOUND = "search"
"""The name of the plan that the search found."""
_FEW = (8, 8)  # tables and ranks up to which the search takes its time
_ROUNDS = 2  # of shakes
_REACH = 1.15  # times the best start: groups of worse ones are not tried; about twice what the fast cost errs by
_FINALISTS, _OTHERS, _MORE_FINALISTS = 3, 2, 10
_SPARE = 0.03  # of the time limit: simulations do not all take as long
_NEAR = 1.08  # times the best fast cost: as far as it errs


def rank_plans(
    task: Task, plans: Mapping[str, Plan], *, workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> ShardingResult:  # fmt: skip
    """Given plans under the full simulation, best first; a plan for other tables or ranks is rejected by name."""
    began = monotonic()
    checked = _check_plans(task, plans)
    scored, _ = Simulations(task, list(checked.values())).simulate(checked, workers, progress)
    ordered = tuple(sorted(scored, key=_get_order_key))
    return ShardingResult(task=task, best=ordered[0], plans=ordered, scored=len(ordered), seconds=monotonic() - began)


def _check_plans(task: Task, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    checked = {}
    for name, plan in plans.items():
        try:
            checked[name] = check_plan(plan, task.tables, task.gpus, task.gpus_per_node)
        except TraincastError as error:
            raise TraincastError(f"plan '{name}': {error}") from None
    return checked


def search(
    task: Task,
    *,
    seed: int = 0,
    time_limit: float = float("inf"),
    rivals: Mapping[str, Plan] | None = None,
    workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> ShardingResult:
    """The best plan found, never worse under the full simulation than a greedy baseline or one of the `rivals`.

    The same seed gives the same plan unless `time_limit` (seconds) ends the search sooner; the baselines are simulated
    first, so there is always a plan. Full simulations are done by the `workers`, which changes no plan.
    """
    began = monotonic()
    others = make_greedy_plans(task.tables, task.limits, task.gpus, batch_size=task.batch_size)
    others |= _check_plans(task, rivals or {})
    simulations = Simulations(task, list(others.values()))
    compared, took = simulations.simulate(others, workers, lambda part: progress(0.1 * part))
    one_simulation = max(took[1:] or took)  # the first simulation also counts what tables ask for, once for all
    cost = simulations.cost
    few = len(task.tables) <= _FEW[0] and task.gpus <= _FEW[1]
    finalists = _MORE_FINALISTS if few else _FINALISTS + _OTHERS
    kept = (finalists + 1) * one_simulation  # one more: what the search is at when time is up is finished
    effort = Effort(rounds=_ROUNDS, reach=_REACH, seed=seed, deadline=began + (1.0 - _SPARE) * time_limit - kept)
    rest = [cost.assignment(plan) for plan in others.values()]
    look = search_thoroughly if few else search_locally
    optima = look(cost, effort, lambda part: progress(0.1 + 0.8 * part), rest)
    chosen = optima[:_MORE_FINALISTS] if few else _choose_finalists(optima)
    names = [table.name for table in task.tables]
    plans = {f"{FOUND} {number}": simplify_plan(optimum.plan(names)) for number, optimum in enumerate(chosen)}
    simulated, _ = simulations.simulate(plans, workers, lambda part: progress(0.9 + 0.1 * part))
    best = replace(min([*simulated, *compared], key=_get_order_key), name=FOUND)
    ordered = tuple(sorted([best, *compared], key=_get_order_key))
    scored = cost.scored
    notes = explain_host_memory(task, best, lambda plan: score_plan(task, cost, FOUND, plan))
    return ShardingResult(task=task, best=best, plans=ordered, scored=scored, seconds=monotonic() - began, notes=notes)


def _get_order_key(scored: ScoredPlan) -> tuple[float, float]:
    return scored.order


def _choose_finalists(optima: list[Assignment]) -> list[Assignment]:
    """The best few, and the best of other sets of groups that come near: there the fast cost may err otherwise."""
    chosen = optima[:_FINALISTS]
    seen = {list_used_groups(optimum).tobytes() for optimum in chosen}
    for optimum in optima[_FINALISTS:]:
        used = list_used_groups(optimum).tobytes()
        near = optimum.score <= _NEAR * optima[0].score
        if used not in seen and near and len(chosen) < _FINALISTS + _OTHERS:
            seen.add(used)
            chosen.append(optimum)
    return chosen


TORCHREC = "TorchRec's plan"
"""The name of the plan that TorchRec's planner makes."""
_TORCHREC_SECONDS = 60  # its planner is asked to stop after this long


def shard(
    tables: str | Workload | tuple[Table, ...],
    *,
    on: str,
    gpus: int,
    batch_size: int | None,
    dtype: str | None = None,
    dense: Path | None = None,
    candidates: Path | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    torchrec: bool = True,
    named: str | None = None,
    workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> ShardingResult:
    """Searches for the plan with the fastest step, or ranks plans of the file `candidates`; `workers` simulate them.
    `named` is what `predict` knows the tables by, if it does."""
    if time_limit is not None and not time_limit >= 0:
        raise TraincastError(f"`time_limit={time_limit:g}`; give seconds, 0 or more")
    if seed < 0:
        raise TraincastError(f"`seed={seed}`; give an integer, 0 or more")
    task, assumed = load_task(tables, on=on, gpus=gpus, batch_size=batch_size, dtype=dtype, dense=dense)
    scenario = None if named is None else Scenario(
        workload=named, on=on, gpus=gpus, batch_size=None if isinstance(tables, Workload) else task.batch_size,
        dtype=dtype, dense=None if dense is None else str(dense),  # type: ignore[arg-type]
    )  # fmt: skip
    notes = [*assumed, *describe_assumed_links(task)]
    if candidates is not None:
        result = rank_plans(task, load_candidates(candidates, task), workers=workers, progress=progress)
    else:
        rivals = make_torchrec_rival(task, time_limit, notes) if torchrec else {}
        limit = float("inf") if time_limit is None else time_limit
        result = search(task, seed=seed, time_limit=limit, rivals=rivals, workers=workers, progress=progress)
    return replace(result, notes=(*result.notes, *notes), scenario=scenario)


def load_task(
    tables: str | Workload | tuple[Table, ...], *, on: str, gpus: int, batch_size: int | None, dtype: str | None = None,
    dense: Path | None = None,
) -> tuple[Task, list[str]]:  # fmt: skip
    """A task from what the command line was given, and what was assumed; `dtype` replaces that of all tables, `dense`
    the dense part of a described DLRM. Without a `batch_size` it is that of a captured step, or the default."""
    to_place, described, assumed = load_recommender(tables, batch_size)
    platform = add_default_links(load_platform(on))
    part = described if dense is None else load_dense(dense)
    if isinstance(part, CapturedDense):
        if dtype is not None:
            raise TraincastError("`dtype` is that of described tables; those of a captured step have their own")
        batch_size = part.program.batch_size
    size = DEFAULT_BATCH if batch_size is None else batch_size
    return make_task(retype_tables(to_place, dtype), platform, gpus=gpus, batch_size=size, dense=part), assumed


def describe_assumed_links(task: Task) -> list[str]:
    """What is assumed about the links of several GPUs of a platform that is a device alone, to be said."""
    return [task.platform.assumed] if task.platform.assumed and task.gpus > 1 else []


def load_candidates(path: Path, task: Task) -> dict[str, Plan]:
    """The plans of a file by name: ours, or one of TorchRec's."""
    content = read_document(path)
    ours = isinstance(content, Mapping) and ({"plans"} == set(content) or "world_size" in content)
    if ours or path.suffix != ".json":
        return load_plans(path)
    from traincast.planner.torchrec.plans import load_plan

    return {path.stem: load_plan(path, task.tables, world_size=task.gpus, gpus_per_node=task.gpus_per_node)}


def write_torchrec_plan(tables: str, task: Task, plan: Plan) -> dict[str, Any]:
    """A plan as TorchRec's; modules are those of a TorchRec description or script, else one for all tables."""
    from traincast.planner.torchrec.plans import plan_to_json
    from traincast.planner.torchrec.tables import default_modules

    content = read_document(Path(tables)) if tables.endswith(".json") else None
    if isinstance(task.dense, CapturedDense):
        content = json.loads(task.dense.workload.meta.get(TABLES, "null"))
    modules = default_modules(task.tables)
    if isinstance(content, Mapping) and "modules" in content:
        modules = {table["name"]: path for path, module in content["modules"].items() for table in module["tables"]}
    return plan_to_json(plan, task.tables, gpus_per_node=task.gpus_per_node, modules=modules)


def make_torchrec_rival(task: Task, time_limit: float | None, notes: list[str]) -> dict[str, Plan]:
    """The plan that TorchRec's planner makes, where it is installed; else a note says why there is none."""
    if find_spec("torchrec") is None:
        notes.append(f"TorchRec is not installed: its plan is not among those compared ({INSTALL_TORCHREC})")
        return {}
    from traincast.planner.torchrec.planner import plan_with_torchrec

    seconds = _TORCHREC_SECONDS if time_limit is None else max(1, min(_TORCHREC_SECONDS, round(time_limit)))
    try:
        return {TORCHREC: plan_with_torchrec(task, timeout_seconds=seconds)}
    except TraincastError as error:
        notes.append(f"TorchRec's plan is not among those compared: {error}")
        return {}
