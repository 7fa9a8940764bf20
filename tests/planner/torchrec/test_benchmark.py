"""The parts of `benchmarks/sharding.py` that decide what it reports."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from traincast.models.placement.options import make_greedy_plans
from traincast.models.placement.plan import check_plan
from traincast.planner.sharding.cost import FastCost

PATH = Path(__file__).parents[3] / "benchmarks" / "sharding.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_of_sharding", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rank_correlation(benchmark):
    values = np.array([3.0, 1.0, 2.0, 10.0])

    assert benchmark.spearman(values, values**3) == pytest.approx(1.0)
    assert benchmark.spearman(values, -values) == pytest.approx(-1.0)
    assert benchmark.spearman(values, np.array([1.0, 3.0, 2.0, 10.0])) == pytest.approx(0.2)


def test_random_tasks_are_the_same_every_time_and_differ(benchmark):
    first, again, other = (benchmark.random_task(seed) for seed in (3, 3, 4))

    assert first.tables == again.tables and first.gpus == again.gpus
    assert first.tables != other.tables
    poolings = [table.pooling.mean for table in first.tables]
    assert max(poolings) > 10 * min(poolings)


def test_neighbours_are_plans_for_the_task(benchmark):
    task = benchmark.random_task(0)
    plans = list(make_greedy_plans(task.tables, task.limits, task.gpus, batch_size=task.batch_size).values())
    cost = FastCost(task, plans)

    found = list(benchmark.neighbours(cost, plans, 6))

    assert len(found) == 6
    for plan in found:
        assert check_plan(plan, task.tables, task.gpus, task.gpus_per_node) == plan
        assert plan not in plans
