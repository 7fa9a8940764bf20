"""DLRMs that train for real: a sharded one computes what one process does, and what is captured is what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.evaluation.trials.tiny import CONFIG, PLANS, TASK, losses  # noqa: E402
from traincast.capturing.from_file import capture_function  # noqa: E402
from traincast_evaluation.trials.catalog import draw_sharding_trials, find_task  # noqa: E402
from traincast_evaluation.trials.dlrm import Division, build_dlrm_step, make_one_rank_plan  # noqa: E402
from traincast_evaluation.trials.workloads import build_trial_workload  # noqa: E402


def ranks_losses(folder):
    """What both ranks print; they find each other in a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.evaluation.trials.sharded_losses", str(folder)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE) for rank in range(2)]
    try:
        return [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_every_sharding_computes_what_one_process_computes(tmp_path):
    alone = losses(build_dlrm_step(TASK, make_one_rank_plan(CONFIG))(12))
    first, second = ranks_losses(tmp_path)
    assert list(first) == list(PLANS) and len(PLANS) >= 6
    for name in PLANS:
        together = [(a + b) / 2 for a, b in zip(first[name], second[name], strict=True)]
        assert together == pytest.approx(alone, rel=1e-5), name
    assert alone[2] < alone[1] < alone[0]


def test_a_division_has_every_table_once():
    for name, plan in PLANS.items():
        division = Division.of(plan, CONFIG, rank=1)
        shards = [shard for held in division.exchanged for shard in held]
        tables = {*(shard.table for shard in shards), *(s.table for s in division.by_rows), *division.copied}
        assert tables == {0, 1, 2, 3}, name
        columns = Counter()
        for shard in shards:
            columns[shard.table] += shard.width
        assert set(columns.values()) <= {8}


def test_one_rank_exchanges_nothing():
    division = Division.of(make_one_rank_plan(CONFIG), CONFIG, rank=0)
    assert division.exchanged == ((),) and division.copied == (0, 1, 2, 3)


class Seen(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_captured_is_what_runs():
    step = build_dlrm_step(TASK, make_one_rank_plan(CONFIG))(6)
    step()
    with Seen() as seen:
        step()
    captured = capture_function(build_dlrm_step(TASK, make_one_rank_plan(CONFIG)), batch_size=6, rebatch=False)
    names = Counter(op.name for op in captured.programs[0].ops)
    for name in (
        "addmm",
        "mm",
        "bmm",
        "_embedding_bag",
        "_embedding_bag_backward",
        "cat",
        "relu",
        "threshold_backward",
    ):
        assert names[f"aten::{name}"] == seen.names[f"aten::{name}"] > 0, name


def test_the_rows_that_lookups_want_are_told_in_the_order_of_the_lookups():
    trial = next(trial for trial in draw_sharding_trials(tasks=1) if trial.plan == "heaviest by rows")
    captured, config = build_trial_workload(trial), find_task(trial).config
    heights = Counter(zip(config.rows_per_table, config.access, strict=True))
    for rank in range(2):
        lookups = [op for op in captured.program(rank).ops if op.name == "aten::_embedding_bag"]
        assert len(lookups) == len(captured.access[rank]) > 0
        whole = [
            (op.inputs[0].spec.shape[0], access)
            for op, access in zip(lookups, captured.access[rank], strict=True)
            if op.inputs[0].spec.shape[0] in config.rows_per_table
        ]
        assert len(whole) >= len(lookups) - 1 and all(heights[pair] for pair in whole)
