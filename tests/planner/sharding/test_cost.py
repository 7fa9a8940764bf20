from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.effort import calls
from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.placement import Placement, Plan, check_plan
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.step import build_sharded_dlrm
from traincast.planner.sharding.assignment import Changes, find_best_candidates
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.durations import find_busiest_bytes
from traincast.planner.sharding.local_search import list_emptied_groups, list_shifts, list_swaps
from traincast.planner.sharding.lookups import BAG
from traincast.planner.sharding.result import make_task
from traincast.simulator.prediction.prediction import predict_step


def skewed_tables(seed, count, pooling=2.5, **changes):
    random = np.random.default_rng(seed)
    return [
        Table(
            name=f"t{i}",
            rows=int(10 ** random.uniform(3, 6.5)),
            dim=int(random.choice([32, 64, 128])),
            pooling=Pooling.from_constant(float(np.ceil(random.lognormal(pooling, 1.0)))),
            access=Zipf(float(random.uniform(0.5, 1.3))),
            optimizer="rowwise_adagrad",
            **changes,
        )
        for i in range(count)
    ]


def random_plan(cost, random, kinds):
    """Half of the tables whole, the others in one of `kinds`, on random ranks."""
    task, choices = cost.task, cost.choices
    placements = []
    for rows in choices.rows:
        able = [choices.options[row] for row in rows if choices.options[row].kind in kinds]
        option = choices.options[rows[0]] if random.random() < 0.5 or not able else able[random.integers(len(able))]
        where = task.gpus // task.gpus_per_node if option.kind == "table_row_wise" else task.gpus
        places = random.integers(where, size=option.slices).tolist()
        placements.append(option.make_placement(places, task.gpus, task.gpus_per_node))
    return Plan(tuple(table.name for table in task.tables), tuple(placements), task.gpus)


def full_walk(task, plan):
    workload = build_sharded_dlrm(
        task.dense, task.tables, plan, batch_size=task.batch_size, gpus_per_node=task.gpus_per_node
    )
    return predict_step(workload, task.platform).iteration


def fast(cost, plan):
    return float(cost.seconds(cost.assignment(plan).stages[None])[0])


@pytest.mark.parametrize(
    ("gpus", "platform", "dense", "kinds"),
    [
        (8, "dgx-a100", None, ("row_wise",)),
        (8, "dgx-a100", None, ("column_wise",)),
        (8, "dgx-h100", Dense(bottom_mlp=(13, 128), top_mlp=(256, 1), interaction="cat"), ("data_parallel",)),
        (16, "dgx-h100", None, ("table_row_wise", "row_wise", "column_wise", "data_parallel")),
    ],
)
def test_the_fast_cost_agrees_with_the_full_walk(gpus, platform, dense, kinds):
    tables = skewed_tables(1, 20)
    task = make_task(tables, load_platform(platform), gpus=gpus, batch_size=4096, dense=dense)
    cost, random = FastCost(task), np.random.default_rng(2)
    for _ in range(3):
        plan = random_plan(cost, random, kinds)
        assert fast(cost, plan) == pytest.approx(full_walk(task, plan), rel=0.05)


def test_the_fast_cost_ranks_plans_as_the_full_walk_does():
    task = make_task(skewed_tables(3, 16), load_platform("dgx-a100"), gpus=4, batch_size=4096)
    cost, random = FastCost(task), np.random.default_rng(4)
    plans = [random_plan(cost, random, ("row_wise", "column_wise", "data_parallel")) for _ in range(24)]
    quick = np.array([fast(cost, plan) for plan in plans])
    slow = np.array([full_walk(task, plan) for plan in plans])
    ranks = [np.argsort(np.argsort(values)) for values in (quick, slow)]
    assert np.corrcoef(*ranks)[0, 1] >= 0.95


def test_weighted_tables_of_other_types_in_host_memory_are_costed_too():
    tables = [
        *skewed_tables(5, 6, weighted=True, dtype="fp16"),
        Table(
            name="big", rows=2_000_000, dim=64, pooling=Pooling.from_constant(20), access=Zipf(1.1), optimizer="adam"
        ),
    ]
    names = tuple(table.name for table in tables)
    placements = [Placement("table_wise", (i % 4,)) for i in range(5)]
    cached = Placement("table_wise", (2,), "fused_uvm_caching", 0.1)
    plan = Plan(names, (*placements, cached, Placement("table_wise", (3,), "fused_uvm")), 4)
    task = make_task(tables, load_platform("dgx-a100"), gpus=4, batch_size=4096)
    assert fast(FastCost(task, [plan]), plan) == pytest.approx(full_walk(task, plan), rel=0.03)


def _whole(names, ranks, world_size):
    return Plan(names, tuple(Placement("table_wise", (rank,)) for rank in ranks), world_size)


def test_steps_that_wait_for_the_host_are_costed_exactly():
    """Launches are what differs: of ranks without tables, of senders, and of sorts of few lookups and of many."""
    tables = [
        Table(name=f"t{i}", rows=10 ** (2 + i), dim=32, pooling=Pooling.from_constant(1 + 9 * (i % 2)), optimizer="sgd")
        for i in range(5)
    ]
    task = make_task(tables, load_platform("dgx-a100"), gpus=4, batch_size=64)
    names = tuple(table.name for table in tables)
    column = tuple(Placement("column_wise", (rank,)) for rank in (0, 1, 1, 2, 3))
    copies = (Placement.make_data_parallel(4), Placement.make_row_wise(4))
    plans = [
        _whole(names, (0, 0, 0, 0, 0), 4),
        _whole(names, (0, 0, 2, 0, 0), 4),
        _whole(names, (0, 1, 2, 3, 3), 4),
        Plan(names, (*_whole(names, (3, 1), 4).placements[:2], *column[2:]), 4),
        Plan(names, (*copies, *column[2:4], Placement("table_wise", (1,))), 4),
        Plan(names, (copies[1],) * 5, 4),
    ]
    cost = FastCost(task)
    simulated = [full_walk(task, plan) for plan in plans]
    assert len({round(1e6 * seconds) for seconds in simulated}) == len(plans)
    assert [fast(cost, plan) for plan in plans] == pytest.approx(simulated, rel=2e-3)


def test_tables_of_several_types_are_costed_whoever_has_which():
    """Groups are ranks' own: some have all types of tables, some have none."""
    forms = [("fp32", False, "rowwise_adagrad"), ("fp16", False, "sgd"), ("fp32", True, "adam")]
    tables = [
        Table(name=f"t{i}", rows=20_000, dim=64, pooling=Pooling.from_constant(4), dtype=d, weighted=w, optimizer=o)
        for i, (d, w, o) in enumerate(forms * 2)
    ]
    task = make_task(tables, load_platform("dgx-h100"), gpus=4, batch_size=1024)
    cost, random = FastCost(task), np.random.default_rng(11)
    assert len(cost.groups) == 4 * len(forms)
    for kinds in (("row_wise", "data_parallel"), ("column_wise",), ("row_wise", "column_wise", "data_parallel")):
        plan = random_plan(cost, random, kinds)
        assert fast(cost, plan) == pytest.approx(full_walk(task, plan), rel=0.04)


def test_plans_that_are_apart_are_ranked_rightly():
    tables = skewed_tables(31, 7, pooling=3.5)
    task = make_task(tables, load_platform("dgx2-v100"), gpus=3, batch_size=4096)
    cost, random = FastCost(task), np.random.default_rng(32)
    plans = [random_plan(cost, random, ("row_wise", "column_wise", "data_parallel")) for _ in range(16)]
    quick, slow = (np.array([of(plan) for plan in plans]) for of in (partial(fast, cost), partial(full_walk, task)))
    first, second = np.triu_indices(len(plans), 1)
    apart = np.abs(np.log(slow[first] / slow[second])) > np.log(1.05)
    right = (quick[first] < quick[second]) == (slow[first] < slow[second])
    assert apart.sum() > 50
    assert right[apart].mean() >= 0.98


def test_where_nothing_fits_the_fullest_rank_decides():
    tables = skewed_tables(33, 6)
    task = make_task(tables, load_platform("dgx-a100"), gpus=2, batch_size=1024)
    names = tuple(table.name for table in tables)
    plans = [_whole(names, ranks, 2) for ranks in ((0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 0, 1), (0,) * 6)]
    need = [FastCost(task).assignment(plan).memory[:, 0].max() for plan in plans]
    tight = replace(task, limits=replace(task.limits, device=0.5 * min(need), headroom=0.0))
    cost = FastCost(tight)
    scores = [cost.assignment(plan).score for plan in plans]
    assert np.argsort(scores).tolist() == np.argsort(need).tolist()
    assert min(scores) > max(full_walk(task, plan) for plan in plans)


def test_changes_score_as_the_assignments_they_lead_to():
    task = make_task(skewed_tables(6, 12), load_platform("dgx-a100"), gpus=4, batch_size=2048)
    cost, random = FastCost(task), np.random.default_rng(7)
    assignment = cost.assignment(random_plan(cost, random, ("row_wise", "column_wise", "data_parallel")))
    everywhere = np.arange(4)
    for changes in (
        list_shifts(assignment, everywhere),
        list_swaps(assignment, everywhere, random),
        _options(assignment),
    ):
        chosen = int(random.integers(changes.count))
        one = changes.take(chosen, chosen + 1)
        best = find_best_candidates(cost, [assignment.pending(one)])[0]
        option, places = assignment.option.copy(), assignment.places.copy()
        option[one.table], places[one.table] = one.option, one.places
        anew = type(assignment)(cost, option, places)
        assert best.score == pytest.approx(anew.score, rel=1e-9)
        assignment.apply(one, best)
        # lengths of bags are summed as high powers: what is left of the longest is far below it
        both = [np.delete(each.sums, BAG, axis=1) for each in (assignment, anew)]
        assert np.allclose(*both, rtol=1e-9, atol=1e-3)
        assert assignment.plan(["x"] * 12) == anew.plan(["x"] * 12)


def test_changes_of_whole_kinds_and_of_nodes_score_as_what_they_lead_to():
    task = make_task(skewed_tables(9, 10), load_platform("dgx-h100"), gpus=16, batch_size=2048)
    cost, random = FastCost(task), np.random.default_rng(3)
    assignment = cost.assignment(random_plan(cost, random, ("table_row_wise", "row_wise")))
    allowed = np.ones(len(cost.groups), dtype=bool)
    emptied = list_emptied_groups(assignment, allowed)
    before = set(cost.choices.group[assignment.option].tolist())
    assert emptied.count == len(before) * (len(cost.groups) - 1)
    for changes in (emptied, list_shifts(assignment, np.arange(16))):
        for chosen in random.integers(changes.count, size=4).tolist():
            one = changes.take(chosen, chosen + 1)
            option, places = assignment.option.copy(), assignment.places.copy()
            option[one.table], places[one.table] = one.option, one.places
            anew = type(assignment)(cost, option, places)
            assert find_best_candidates(cost, [assignment.pending(one)])[0].score == pytest.approx(anew.score, rel=1e-9)
            check_plan(anew.plan([table.name for table in task.tables]), task.tables, 16, 8)
    one = emptied.take(0, 1)
    assert set(one.table.tolist()) == {
        table for table in range(10) if cost.choices.group[assignment.option[table]] == min(before)
    }


def _options(assignment):
    """Every table that is not split by rows, split by rows."""
    choices = assignment.choices
    rows = [next((r for r in own if choices.options[r].kind == "row_wise"), None) for own in choices.rows]
    tables = np.array([t for t, row in enumerate(rows) if row is not None and assignment.option[t] != row])
    places = np.full((len(tables), choices.most_slices), -1)
    return Changes.single(tables, np.array([rows[t] for t in tables]), places)


def test_plans_are_scored_together():
    task = make_task(skewed_tables(8, 26), load_platform("dgx-a100"), gpus=8, batch_size=2048)
    cost = FastCost(task)
    plan = Plan(tuple(t.name for t in task.tables), tuple(Placement("table_wise", (i % 8,)) for i in range(26)), 8)
    assignment = cost.assignment(plan)
    changes = list_swaps(assignment, np.arange(8), np.random.default_rng(0))
    find_best_candidates(cost, [assignment.pending(changes)])
    assert calls(lambda: find_best_candidates(cost, [assignment.pending(changes)])) < 8 * changes.count, (
        "arrays of them"
    )


def test_the_busiest_receiver_decides_an_exchange():
    even = np.full(16, 10.0)
    assert find_busiest_bytes(even, 8) == pytest.approx(10.0)
    one = np.where(np.arange(16) == 3, 100.0, 0.0)
    assert find_busiest_bytes(one, 16) == 100.0
    node = np.where(np.arange(16) < 8, 20.0, 0.0)
    # a node that receives everything gets 8 x 20 x 8/16 over the network, as much as an even exchange of 20 a rank
    assert find_busiest_bytes(node, 8) == pytest.approx(20.0)


def test_a_huge_table_that_could_be_copied_costs_small_copied_ones_nothing():
    small = [
        Table(name=f"s{i}", rows=1000, dim=32, pooling=Pooling.from_constant(2), access=Zipf(1.0)) for i in range(8)
    ]
    huge = Table(name="huge", rows=40_000_000, dim=128, pooling=Pooling.from_constant(10), access=Zipf(1.0))
    task = make_task([*small, huge], load_platform("dgx-a100"), gpus=8, batch_size=2048)
    names = tuple(table.name for table in task.tables)
    copy = Placement("data_parallel", tuple(range(8)), "dense")
    plan = Plan(names, (*[copy] * 8, Placement("table_wise", (0,))), 8)
    every = Plan(names, (copy,) * 9, 8)
    cost = FastCost(task, [plan, every])
    assert fast(cost, plan) == pytest.approx(full_walk(task, plan), rel=0.03)
    assert fast(cost, every) == pytest.approx(full_walk(task, every), rel=0.03)
