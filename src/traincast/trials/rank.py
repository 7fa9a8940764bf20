"""One rank of several, run as `python -m traincast.trials.rank FOLDER` with torchrun's environment variables."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from traincast.benching.opening import open_device
from traincast.benching.timing import Reference
from traincast.trials.catalog import Trial
from traincast.trials.collectives import collective_work
from traincast.trials.isolated import isolated_seconds
from traincast.trials.orders import JOBS, RESULTS
from traincast.trials.steps import make_step_of

_WARM_UPS = 2  # the first step makes buckets and loads kernels, the second fills the allocator's cache
_LEAST, _MOST = 5, 60  # repetitions
_BLOCK_SECONDS = 0.05  # steps that are shorter run several times between two looks at the clock
_MOST_STEPS = 20  # of a block


def work_of(job: dict[str, Any], rank: int, ranks: int) -> Callable[[], object]:
    """What a job asks to be run: the step of a trial, or a collective."""
    if "trial" in job:
        trial = Trial.from_dict(job["trial"])
        return make_step_of(trial)(trial.batch_size, rank=rank, world_size=ranks)
    return collective_work(job["collective"], int(job["bytes"]), rank, ranks)


def measure_together(work: Callable[[], object], reference: Reference, seconds: float) -> dict[str, list[float]]:
    """Seconds of every repetition by both clocks, and of the reference beside it: of the slowest rank on the wall's
    clock ("step"), else means over ranks ("busy" is processor time of a whole rank)."""
    steps, repeats = _sizes(work, seconds)
    taken, busy, beside = [], [], []
    for _ in range(repeats):
        dist.barrier()
        beside.append(reference.seconds())
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            work()
        taken.append((time.perf_counter() - begin) / steps)
        busy.append((time.process_time() - used) / steps)
    dist.barrier()
    beside.append(reference.seconds())
    return {
        "step": _slowest(taken),
        "busy": _mean(busy),
        "reference": _mean(_between([one.wall for one in beside])),
        "reference_busy": _mean(_between([one.busy for one in beside])),
    }


def _between(values: list[float]) -> list[float]:
    """The geometric means of neighbours."""
    return [math.sqrt(before * after) for before, after in pairwise(values)]


def _sizes(work: Callable[[], object], seconds: float) -> tuple[int, int]:
    """How often the work runs between two looks at the clock, and how many looks there are; the same on all ranks."""
    for _ in range(_WARM_UPS):
        work()
    dist.barrier()
    begin = time.perf_counter()
    work()
    once = _slowest([time.perf_counter() - begin])[0]
    steps = max(1, min(_MOST_STEPS, round(_BLOCK_SECONDS / once)))
    return steps, max(_LEAST, min(_MOST, round(seconds / (steps * once))))


def _ops_alone(step: Callable[[], object], reference: Reference) -> dict[str, float]:
    """The step's ops one by one, in units of the reference before and after."""
    before = reference.seconds().busy
    seconds = isolated_seconds(step)
    return {"isolated": seconds / math.sqrt(before * reference.seconds().busy)}


def _slowest(values: list[float]) -> list[float]:
    return _reduced(values, dist.ReduceOp.MAX)


def _mean(values: list[float]) -> list[float]:
    ranks = dist.get_world_size()
    return [value / ranks for value in _reduced(values, dist.ReduceOp.SUM)]


def _reduced(values: list[float], how: Any) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, how)
    return [float(value) for value in numbers]


def _own_core(rank: int) -> None:
    """A core for each rank, where the system has them: its threads then compete with each other, not with those of
    other ranks."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= dist.get_world_size():
            os.sched_setaffinity(0, {cores[rank]})


def main(folder: Path) -> None:
    """Does all jobs; the first rank writes the results, a line each."""
    jobs = json.loads((folder / JOBS).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _own_core(rank)
    reference = Reference(open_device("cpu"))
    with (folder / RESULTS).open("a", encoding="utf-8") as results:
        for job in jobs:
            work = work_of(job, rank, ranks)
            taken: dict[str, Any] = measure_together(work, reference, float(job["seconds"]))
            if job.get("isolated"):
                taken |= _ops_alone(work, reference)
            if rank == 0:
                results.write(json.dumps({**job, **taken}) + "\n")
                results.flush()
            del work
            gc.collect()  # the next model needs the memory, and no collection may fall into its steps
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
