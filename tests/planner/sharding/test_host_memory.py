"""Why a plan has tables in host memory."""

from __future__ import annotations

from tests.planner.sharding.conftest import table
from traincast.hardware.platform import load_platform
from traincast.models.placement import Placement, Plan
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.result import explain_host_memory, make_task
from traincast.planner.sharding.search import score_plan, search


def large_and_small():
    tables = [table("large", rows=90_000_000), table("small", rows=1000)]
    return make_task(tables, load_platform("dgx1-v100"), gpus=1, batch_size=512)


def test_a_search_says_why_it_leaves_the_device():
    # Given a table larger than a V100 and a small one, when a plan is searched
    result = search(large_and_small())
    # Then the page says that there is no room for the large one, and what is missing
    (said,) = [note for note in result.notes if "no room" in note]
    assert "large" in said and "GB would be missing" in said


def test_tables_that_would_fit_are_told_apart():
    # Given a plan that has both in host memory
    task = large_and_small()
    plan = Plan(("large", "small"), (Placement("table_wise", (0,), "fused_uvm"),) * 2, 1)
    cost = FastCost(task, [plan])
    best = score_plan(task, cost, "mine", plan)
    # When it is asked why, then the small one is said to fit, with what the step would take
    no_room, fits = explain_host_memory(task, best, lambda other: score_plan(task, FastCost(task, [other]), "x", other))
    assert "large (" in no_room and "small" not in no_room
    assert "although each would fit: small; on their devices the step is" in fits


def test_a_plan_on_devices_needs_no_reason(node_task):
    names = tuple(one.name for one in node_task.tables)
    plan = Plan(names, (Placement("table_wise", (0,)),) * len(names), node_task.gpus)
    best = score_plan(node_task, FastCost(node_task, [plan]), "mine", plan)
    assert explain_host_memory(node_task, best, lambda _: best) == ()
