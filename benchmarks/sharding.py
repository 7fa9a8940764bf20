"""Search for sharding plans against TorchRec's planner on the same tasks, in one run.

    .venv/bin/python benchmarks/sharding.py [--tables 26,200,800] [--gpus 8,64] [--random 20] [--timeout 300] [--fused]
                                            [--dense]
    .venv/bin/python benchmarks/sharding.py --anytime [--tables 26,200,800] [--gpus 8,64]

For each task: seconds of both searches and their ratio (goal: at most 1), the predicted step under both plans by the
full simulation (goal: never worse than TorchRec's or a greedy baseline; 5 % better on average over random tasks), plans
scored per second by the fast cost (goal: 10,000), and how it agrees with the full simulation over plans: rank
correlation (goal: 0.95), share of the pairs of plans more than 5 % apart that it ranks rightly, and worst error.
TorchRec is imported before the clock starts and stops after `--timeout` seconds: a ratio is then an upper bound.
`--dense` adds MLPs under DDP to every task: a whole step. `--anytime` needs no TorchRec: the step of the
plan found in this many seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from traincast.hardware.platform import load_platform
from traincast.models.embeddings import Pooling, Table, Zipf, load_tables
from traincast.models.placement.plan import Plan
from traincast.models.sharded_dlrm.dense import Dense
from traincast.planner.sharding.assignment import Changes, find_best_candidates
from traincast.planner.sharding.cost import FastCost
from traincast.planner.sharding.result import Task, make_task
from traincast.planner.sharding.search import FOUND, rank_plans, search
from traincast.planner.torchrec.planner import import_torchrec, plan_with_torchrec
from traincast.utils.arrays import FloatArray

GLOBAL_BATCH = 65_536  # of both published sets
NODE = "dgx-h100"
RANDOM_NODES = ("dgx-a100", "dgx-h100", "dgx2-v100")
RANKED = 24  # plans of a task that are both costed and simulated
SCORED_AT_ONCE, SCORED_BATCHES = 1024, 5
APART = 1.05  # steps of plans that a ranking has to tell apart
DENSE = Dense(bottom_mlp=(13, 512, 256, 128), top_mlp=(1024, 1024, 512, 256, 1), interaction="cat", optimizer="adagrad")
LIMITS = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, float("inf"))  # seconds


def sized_tasks(counts: Sequence[int], gpus: Sequence[int], dense: Dense | None = None) -> Iterator[tuple[str, Task]]:
    """The 26 tables of MLPerf, or the first tables of the 856 published ones, on a given number of GPUs."""
    for count in counts:
        tables = load_tables("mlperf-dlrm-v2") if count == 26 else load_tables("dlrm-2021-856")[:count]
        for number in gpus:
            size = GLOBAL_BATCH // number
            task = make_task(tables, load_platform(NODE), gpus=number, batch_size=size, dense=dense)
            yield f"{count} tables, {number} GPUs", task


def random_task(seed: int, dense: Dense | None = None) -> Task:
    """Tables whose heights, widths, poolings and access all differ by a lot."""
    generator = np.random.default_rng(seed)
    tables = [
        Table(
            name=f"t{number}",
            rows=int(10 ** generator.uniform(2.5, 7.5)),
            dim=int(generator.choice([16, 32, 64, 128])),
            pooling=Pooling.from_constant(float(np.clip(np.round(generator.lognormal(1.5, 1.3)), 1, 200))),
            access=Zipf(float(generator.uniform(0.6, 1.3))),
            optimizer="rowwise_adagrad",
        )
        for number in range(int(generator.integers(16, 61)))
    ]
    node = load_platform(RANDOM_NODES[seed % len(RANDOM_NODES)])
    gpus, size = int(generator.choice([8, 16])), int(generator.choice([1024, 4096]))
    return make_task(tables, node, gpus=gpus, batch_size=size, dense=dense)


def compare(name: str, task: Task, timeout: int, kernels: Sequence[str] | None) -> dict[str, object]:
    """Both searches on one task, neither knowing the other's plan."""
    start = time.perf_counter()
    theirs = plan_with_torchrec(task, timeout_seconds=timeout, kernels=kernels)
    their_seconds = time.perf_counter() - start
    answer = search(task, time_limit=their_seconds)
    (torchrecs,) = rank_plans(task, {"torchrec": theirs}).plans
    greedy = [plan for plan in answer.plans if plan.name != FOUND]
    ours = answer.best.seconds
    return {
        "task": name,
        "tables": len(task.tables),
        "gpus": task.gpus,
        "torchrec_s": round(their_seconds, 2),
        "ours_s": round(answer.seconds, 2),
        "time_ratio": round(answer.seconds / their_seconds, 3),
        "step_ms": round(1e3 * ours, 3),
        "torchrec_step_ms": round(1e3 * torchrecs.seconds, 3),
        "torchrec_fits": torchrecs.fits,
        "gain_pct": round(100 * (torchrecs.seconds / ours - 1), 1),
        "best_greedy_step_ms": round(1e3 * min(plan.seconds for plan in greedy if plan.fits), 3),
        "never_worse": all(answer.best.order <= other.order for other in (torchrecs, *greedy)),
        **ranking(task, [answer.best.plan, theirs, *(plan.plan for plan in greedy)]),
    }


def ranking(task: Task, plans: Sequence[Plan]) -> dict[str, object]:
    """Speed of the fast cost, and its rank correlation with the full simulation over these plans and changes."""
    cost = FastCost(task, plans)
    pool = [*plans, *neighbours(cost, plans, RANKED - len(plans))]
    scored = rank_plans(task, {str(number): plan for number, plan in enumerate(pool)}).plans
    fast, simulated = np.array([(plan.fast_seconds, plan.seconds) for plan in scored]).T
    return {
        "plans_per_s": round(scoring_speed(cost, plans[-1])),
        "spearman": round(spearman(fast, simulated), 3),
        "pairs_right": round(pairs_right(fast, simulated), 4),
        "worst_fast_error_pct": round(100 * float(np.abs(fast / simulated - 1).max()), 1),
    }


def scoring_speed(cost: FastCost, plan: Plan) -> float:
    """Plans scored in a second of one core: a greedy plan with one table moved to another rank, thousands of times."""
    generator = np.random.default_rng(0)
    choices, placed = cost.choices, cost.assignment(plan)
    movable = np.flatnonzero([choices.options[row].slices > 0 for row in placed.option])
    scored, seconds = 0, 0.0
    for batch in range(SCORED_BATCHES):
        tables = generator.choice(movable, size=SCORED_AT_ONCE)
        places = placed.places[tables].copy()
        for row, option in enumerate(placed.option[tables].tolist()):
            among = choices.options[option].count_targets(choices.world_size, choices.gpus_per_node)
            places[row, : choices.options[option].slices] = generator.integers(0, among, choices.options[option].slices)
        changes = Changes.single(tables, placed.option[tables], places)
        start = time.process_time()
        find_best_candidates(cost, [placed.pending(changes)])
        if batch:  # the first time, walks are compiled
            scored, seconds = scored + SCORED_AT_ONCE, seconds + time.process_time() - start
    return scored / seconds


def neighbours(cost: FastCost, plans: Sequence[Plan], count: int) -> Iterator[Plan]:
    """Plans in which some tables were moved to other ranks or sharded otherwise."""
    generator = np.random.default_rng(0)
    choices, names = cost.choices, plans[0].tables
    for number in range(count):
        changed = list(plans[number % len(plans)].placements)
        size = round(len(names) ** generator.uniform())  # from one table to all
        for table in generator.choice(len(names), size=size, replace=False):
            option = choices.options[int(generator.choice(choices.rows[table]))]
            among = option.count_targets(choices.world_size, choices.gpus_per_node)
            places = generator.integers(0, among, size=max(1, option.slices)).tolist()
            changed[table] = option.make_placement(places[: option.slices], choices.world_size, choices.gpus_per_node)
        yield Plan(names, tuple(changed), choices.world_size)


def spearman(one: FloatArray, other: FloatArray) -> float:
    """Correlation of ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def pairs_right(fast: FloatArray, simulated: FloatArray) -> float:
    """Share of the pairs of plans whose walks are apart that the fast cost puts in the right order."""
    first, second = np.triu_indices(len(fast), 1)
    apart = np.abs(np.log(simulated[first] / simulated[second])) > np.log(APART)
    right = (fast[first] < fast[second]) == (simulated[first] < simulated[second])
    return float(right[apart].mean()) if np.any(apart) else 1.0


def anytime(name: str, task: Task) -> dict[str, object]:
    """The step of the best plan found, by time limit, and the seconds that the search took."""
    found = {limit: search(task, time_limit=limit) for limit in LIMITS}
    return {
        "task": name,
        "step_ms": {str(limit): round(1e3 * answer.best.seconds, 3) for limit, answer in found.items()},
        "took_s": {str(limit): round(answer.seconds, 2) for limit, answer in found.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="26,200,800")
    parser.add_argument("--gpus", default="8,64")
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=300, help="seconds after which TorchRec's planner stops")
    parser.add_argument("--fused", action="store_true", help="TorchRec tries fused kernels only: faster, and no copies")
    parser.add_argument("--dense", action="store_true", help="whole steps, with MLPs besides the tables")
    parser.add_argument("--anytime", action="store_true", help="only our search, under several time limits")
    arguments = parser.parse_args()
    counts, gpus = ([int(part) for part in text.split(",") if part] for text in (arguments.tables, arguments.gpus))
    dense = DENSE if arguments.dense else None
    if arguments.anytime:
        for name, task in sized_tasks(counts, gpus, dense):
            print(json.dumps(anytime(name, task)), flush=True)
        return 0
    import_torchrec("distributed.planner")
    random_tasks = [(f"random {seed}", random_task(seed, dense)) for seed in range(arguments.random)]
    tasks = [*sized_tasks(counts, gpus, dense), *random_tasks]
    rows = []
    for name, task in tasks:
        rows.append(compare(name, task, arguments.timeout, ("fused",) if arguments.fused else None))
        print(json.dumps(rows[-1]), flush=True)
    random = [float(str(row["gain_pct"])) for row in rows if str(row["task"]).startswith("random")]
    summary = {
        "tasks": len(rows),
        "never_worse": all(row["never_worse"] for row in rows),
        "mean_gain_pct_random": round(statistics.mean(random), 1) if random else None,
        "largest_time_ratio": max(float(str(row["time_ratio"])) for row in rows),
        "smallest_spearman": min(float(str(row["spearman"])) for row in rows),
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
