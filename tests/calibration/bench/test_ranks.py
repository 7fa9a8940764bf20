"""Ranks launched as torchrun would: results as they come, and clear words when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import islice

import pytest

pytest.importorskip("torch")

from traincast.calibration.bench.collectives import KINDS, make_collective_job, plan_collectives
from traincast.calibration.bench.ranks import run_ranks
from traincast.utils.errors import TraincastError


def test_two_ranks_measure_every_collective():
    heard = []
    jobs = [make_collective_job(row, 0.02) for row in islice(plan_collectives(2), len(KINDS))]
    run_ranks(jobs, 2, each=heard.append)
    assert [job["collective"] for job in heard] == list(KINDS)
    for result in heard:
        times = [result[name] for name in ("step", "busy", "reference", "reference_busy")]
        assert len({len(values) for values in times}) == 1 and len(times[0]) >= 5
        assert all(value > 0 for values in times for value in values)


def test_a_disturbed_job_is_measured_again_up_to_twice():
    heard = []
    job = {"collective": "all_reduce", "bytes": 64, "seconds": 0.0, "most": 4}
    run_ranks([job, {**job, "calm": 1e3}, {**job, "calm": 1e-9}], 2, each=heard.append)
    assert [len(result["step"]) for result in heard] == [4, 4, 12]


def test_the_plan_is_seeded_and_covers_sizes_evenly():
    first, again, other = (
        [make_collective_job(row, 1.0) for row, _ in zip(plan_collectives(2, seed), range(140), strict=False)]
        for seed in (3, 3, 4)
    )
    assert first == again != other
    for kind in KINDS:
        sizes = [job["bytes"] for job in first if job["collective"] == kind]
        assert len(sizes) == 20 and min(sizes) < 10_000 and max(sizes) > 16 << 20
        assert sum(size < 370_000 for size in sizes) in (9, 10, 11), "half of them in each half of the logarithm"
    uneven = [job["sent"] for job in first if job["collective"] == "all_to_all_v"]
    assert all(row[0] == row[1] for rows in uneven for row in rows) and any(rows[0] != rows[1] for rows in uneven)


def test_a_rank_that_fails_says_why():
    jobs = [{"collective": "gossip", "bytes": 8, "seconds": 0.01}]
    with pytest.raises(TraincastError, match=r"rank 0 of 1 ended early: .*unknown collective 'gossip'"):
        run_ranks(jobs, 1, each=lambda _: None)


def test_no_rank_is_left_when_the_time_is_over(monkeypatch):
    began = []
    start = subprocess.Popen

    def started(*args, **kwargs):
        began.append(start(*args, **kwargs))
        return began[-1]

    monkeypatch.setattr(subprocess, "Popen", started)
    run_ranks([{"collective": "all_reduce", "bytes": 8, "seconds": 60.0}], 2, each=lambda _: None, seconds=0.0)
    assert [process.returncode for process in began] == [-signal.SIGKILL] * 2


def test_a_rank_whose_launcher_is_gone_before_it_looks_ends():
    code = "import time; from traincast.calibration.bench.rank import _end_with_launcher as end; end(); time.sleep(300)"
    environment = {**os.environ, "TRAINCAST_LAUNCHER": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=200).returncode == 1
