"""The search for a plan: starts and local search on the fast cost, finalists and baselines on the full walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

from traincast.models.placement.greedy import make_greedy_plans
from traincast.models.placement.plan import Plan, check_plan, simplify_plan
from traincast.planner.sharding.assignment import Assignment
from traincast.planner.sharding.descent import Effort, list_used_groups, search_locally
from traincast.planner.sharding.host_memory import explain_host_memory
from traincast.planner.sharding.result import ShardingResult
from traincast.planner.sharding.scored_plan import ScoredPlan
from traincast.planner.sharding.simulations import Simulations, score_plan
from traincast.planner.sharding.task import Task
from traincast.planner.sharding.thorough import search_thoroughly
from traincast.utils.errors import TraincastError
from traincast.utils.parallel.runner import SEARCH, Workers

FOUND = "search"
"""The name of the plan that the search found."""
_FEW = (8, 8)  # tables and ranks up to which the search takes its time
_ROUNDS = 2  # of shakes
_REACH = 1.15  # times the best start: groups of worse ones are not tried; about twice what the fast cost errs by
_FINALISTS, _OTHERS, _MORE_FINALISTS = 3, 2, 10
_SPARE = 0.03  # of the time limit: walks do not all take as long
_NEAR = 1.08  # times the best fast cost: as far as it errs


def rank_plans(
    task: Task, plans: Mapping[str, Plan], *, workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> ShardingResult:  # fmt: skip
    """Given plans under the full walk, best first; a plan for other tables or ranks is rejected by name."""
    began = monotonic()
    checked = _check_plans(task, plans)
    scored, _ = Simulations(task, list(checked.values())).walked(checked, workers, progress)
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
    """The best plan found, never worse under the full walk than a greedy baseline or one of the `rivals`.

    The same seed gives the same plan unless `time_limit` (seconds) ends the search sooner; the baselines are simulated
    first, so there is always a plan. Full walks are done by the `workers`, which changes no plan.
    """
    began = monotonic()
    others = make_greedy_plans(task.tables, task.limits, task.gpus, batch_size=task.batch_size)
    others |= _check_plans(task, rivals or {})
    simulations = Simulations(task, list(others.values()))
    compared, took = simulations.walked(others, workers, lambda part: progress(0.1 * part))
    one_walk = max(took[1:] or took)  # the first walk also counts what tables ask for, once for all
    cost = simulations.cost
    few = len(task.tables) <= _FEW[0] and task.gpus <= _FEW[1]
    finalists = _MORE_FINALISTS if few else _FINALISTS + _OTHERS
    kept = (finalists + 1) * one_walk  # one more: what the search is at when time is up is finished
    effort = Effort(rounds=_ROUNDS, reach=_REACH, seed=seed, deadline=began + (1.0 - _SPARE) * time_limit - kept)
    rest = [cost.assignment(plan) for plan in others.values()]
    look = search_thoroughly if few else search_locally
    optima = look(cost, effort, lambda part: progress(0.1 + 0.8 * part), rest)
    chosen = optima[:_MORE_FINALISTS] if few else _choose_finalists(optima)
    names = [table.name for table in task.tables]
    plans = {f"{FOUND} {number}": simplify_plan(optimum.plan(names)) for number, optimum in enumerate(chosen)}
    simulated, _ = simulations.walked(plans, workers, lambda part: progress(0.9 + 0.1 * part))
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
