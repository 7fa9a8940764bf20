"""One rank of several, run as a module with torchrun's environment variables: what it measures together with others."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from traincast.calibration.bench.collectives import make_collective_call
from traincast.calibration.bench.device import Device, Reference, Seconds, run_timed
from traincast.calibration.bench.measure import COLLECTIVE, JOBS, LAUNCHER, RESULTS
from traincast.calibration.bench.store import open_device
from traincast.utils.arrays import FloatArray

Work = Callable[[], object]


class Prepared:
    """Work that finds its operands in a state of its own: `prepare` runs before every call, untimed, and a call is
    timed by itself."""

    def __init__(self, work: Work, prepare: Work) -> None:
        self.work, self.prepare = work, prepare

    def __call__(self) -> object:
        """The work alone."""
        return self.work()


Works = Mapping[str, Callable[[dict[str, Any], int, int, Device], Work]]
"""How a job becomes work of a rank, by the field that the job has: (job, rank, ranks, device)."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_WARM_UPS = 2  # the first step makes buckets and loads kernels, the second fills the allocator's cache
_LEAST, _MOST = 5, 60  # repetitions
_ROUNDS = 3  # of them, at most, where neighbours disturb
_BLOCK_SECONDS = 0.12  # steps that are shorter run several times between two references
_MOST_STEPS = 20  # of a block
_THREAD_STEPS = 12  # of a small step, each way; the same on all ranks, which exchange in it
_CALLS = 10  # of a collective on GPUs, one behind the other
_BETWEEN_BYTES = 1 << 20  # that a step touches between the last gradient of a bucket and the call
_LOOK_SECONDS = 0.5  # between two looks at whether the launcher is still there


def measure_together(
    work: Work, reference: Reference, seconds: float, device: Device, most: int = _MOST, calm: float = math.inf
) -> dict[str, list[float]]:
    """Seconds of every repetition by both clocks, and of the reference alongside it: of the slowest rank on the wall's
    clock ("step"), else means over ranks ("busy" is processor time of a whole rank).

    Where the reference took longer than `calm` seconds in more than half of them (neighbours), they are done again, up
    to twice."""
    if isinstance(work, Prepared) and device.kind == "cuda":
        return _measure_kernels_together(work, reference, seconds, device, most)
    steps, repeats = _choose_repeats(work, seconds, device, most)
    taken, busy, beside = list[float](), list[float](), list[Seconds]()
    for turn in range(repeats * _ROUNDS):
        if turn and turn % repeats == 0 and _is_calm_on_all([one.busy for one in beside], calm, device):
            break
        dist.barrier()
        beside.append(reference.seconds())
        if isinstance(work, Prepared):
            work.prepare()
        device.synchronise()
        dist.barrier()
        lasted = _time_consecutive_steps(work, steps, device)
        taken.append(lasted[0])
        busy.append(lasted[1])
    dist.barrier()
    beside.append(reference.seconds())
    return {
        "step": _reduce_max(taken, device),
        "busy": _reduce_mean(busy, device),
        "reference": _reduce_mean(_average_neighbours([one.wall for one in beside]), device),
        "reference_busy": _reduce_mean(_average_neighbours([one.busy for one in beside]), device),
    }


def _time_consecutive_steps(work: Work, steps: int, device: Device) -> FloatArray:
    """Medians over this many steps of their seconds on the wall's clock and of the processor, without the first, which
    finds its place in the caches taken by the reference. Single steps that the system interrupts do not count: with a
    rank on every core there is no other for whatever else runs on the machine."""
    marks = [(time.perf_counter(), time.process_time())]
    for _ in range(steps):
        work()
        device.synchronise()
        marks.append((time.perf_counter(), time.process_time()))
    lasted = np.diff(np.array(marks), axis=0)
    return np.asarray(np.median(lasted[min(1, steps - 1) :], axis=0))


def _is_calm_on_all(references: list[float], calm: float, device: Device) -> bool:
    """Whether on every rank at least half of the references took no longer than that."""
    longer = sum(one > calm for one in references) / len(references)
    return _reduce_max([longer], device)[0] <= 0.5


def _measure_kernels_together(
    work: Prepared, reference: Reference, seconds: float, device: Device, most: int
) -> dict[str, list[float]]:
    """As `measure_together`, of kernels alone: every GPU is kept busy until its host has launched them. Several calls
    wait in the queue one behind the other, as in NCCL's own benchmark, whose curves this is compared with: what ranks
    leave the barrier apart is then divided by their number."""
    _, repeats = _choose_repeats(work, seconds / _CALLS, device, most)
    taken, beside = [], []

    def prepare() -> None:
        work.prepare()
        device.synchronise()
        dist.barrier()

    def calls() -> None:
        for _ in range(_CALLS):
            work()

    for _ in range(repeats):
        beside.append(reference.seconds())
        taken.append(run_timed(device, calls, prepare, queued=True).wall / _CALLS)
    beside.append(reference.seconds())
    lasted = _reduce_max(taken, device)
    references = _reduce_mean(_average_neighbours([one.wall for one in beside]), device)
    return {"step": lasted, "busy": lasted, "reference": references, "reference_busy": references}


def _average_neighbours(values: list[float]) -> list[float]:
    """The geometric means of neighbours."""
    return [math.sqrt(before * after) for before, after in pairwise(values)]


def _choose_repeats(work: Work, seconds: float, device: Device, most: int) -> tuple[int, int]:
    """How often the work runs between two looks at the clock, and how many looks there are; the same on all ranks."""
    for _ in range(_WARM_UPS):
        work()
    device.synchronise()
    dist.barrier()
    begin = time.perf_counter()
    work()
    device.synchronise()
    once = _reduce_max([time.perf_counter() - begin], device)[0]
    steps = 1 if isinstance(work, Prepared) else max(1, min(_MOST_STEPS, round(_BLOCK_SECONDS / once)))
    return steps, max(min(_LEAST, most), min(most, round(seconds / (steps * once))))


def _reduce_max(values: list[float], device: Device) -> list[float]:
    return _all_reduce(values, dist.ReduceOp.MAX, device)


def _reduce_mean(values: list[float], device: Device) -> list[float]:
    ranks = dist.get_world_size()
    return [value / ranks for value in _all_reduce(values, dist.ReduceOp.SUM, device)]


def _all_reduce(values: list[float], how: Any, device: Device) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    if device.kind == "cuda":  # NCCL takes nothing else
        numbers = numbers.cuda()
    dist.all_reduce(numbers, how)
    return [float(value) for value in numbers]


def _pin_own_core(rank: int, ranks: int) -> None:
    """A core for each rank, where the system has them: its threads then compete with each other, not with those of
    other ranks."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= ranks:
            os.sched_setaffinity(0, {cores[rank]})


def _end_with_launcher() -> None:
    """Ends this rank when the process that started it is gone: nobody would hear its results."""
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))  # told, since it may be gone before this is read

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve_jobs(
    folder: Path,
    works: Works,
    after: Callable[[dict[str, Any], Work, Reference], dict[str, Any]] = lambda *_: {},
) -> None:
    """Does the jobs of a folder; the first rank writes the results, a line each. `after` adds to a job's results."""
    _end_with_launcher()
    order = json.loads((folder / JOBS).read_text(encoding="utf-8"))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = open_device(order["device"], int(os.environ["LOCAL_RANK"]))
    collective = dist.FileStore(str(folder / COLLECTIVE), ranks)  # type: ignore[attr-defined]
    dist.init_process_group(BACKENDS[device.kind], store=collective, rank=rank, world_size=ranks)
    if device.kind == "cpu":
        _pin_own_core(rank, ranks)
    reference = Reference(device)
    with (folder / RESULTS).open("a", encoding="utf-8") as results:
        for job in order["jobs"]:
            make = next(make for field, make in works.items() if field in job)
            work = make(job, rank, ranks, device)
            most = int(job.get("most", _MOST))
            calm = float(job.get("calm", math.inf))
            taken: dict[str, Any] = measure_together(work, reference, float(job["seconds"]), device, most, calm)
            taken |= after(job, work, reference)
            if rank == 0:
                results.write(json.dumps({**job, **taken}) + "\n")
                results.flush()
            del work
            gc.collect()  # the next model needs the memory, and no collection may fall into its steps
    dist.destroy_process_group()


def make_collective_step(job: dict[str, Any], rank: int, ranks: int, device: Device) -> Work:
    """The collective of a job as a step calls it: its buffers were written a little before."""
    work = make_collective_call(job, rank, ranks, device)

    def prepare() -> None:
        work()
        device.flush(_BETWEEN_BYTES)

    return Prepared(work, prepare)


def make_small_step_work(job: dict[str, Any], rank: int, ranks: int, _: Device) -> Work:
    """The small step of a job."""
    from traincast.calibration.bench.inside import SmallStep

    small = SmallStep.from_dict(job["small_step"])
    return small.make(small.batch_size, rank=rank, world_size=ranks)


def measure_ops_together(job: dict[str, Any], work: Work, reference: Reference) -> dict[str, Any]:
    """Of a small step, what its own thread takes of the processor ("thread", seconds, and "alongside", the reference),
    how long it took on the wall's clock until the last rank was done ("together", and "beside_wall"), and its ops timed
    on all ranks at once: names, and times in units of the reference."""
    if "small_step" not in job:
        return {}
    from traincast.calibration.bench.inside import time_ops_inside

    taken, walls, beside = list[float](), list[float](), list[Seconds]()
    for _ in range(_THREAD_STEPS):
        dist.barrier()
        beside.append(reference.seconds())
        work()
        began, begin = time.perf_counter(), time.thread_time()
        work()
        taken.append(time.thread_time() - begin)
        walls.append(time.perf_counter() - began)
    walls, beside_wall = (_reduce_max(some, reference.device) for some in (walls, [one.wall for one in beside]))
    names, times = time_ops_inside(work, reference, repeats=_THREAD_STEPS)
    return {
        "thread": taken,
        "beside": [one.busy for one in beside],
        "together": walls,
        "beside_wall": beside_wall,
        "names": names,
        "op_wall": times["wall"].tolist(),
        "op_busy": times["busy"].tolist(),
    }


if __name__ == "__main__":
    serve_jobs(
        Path(sys.argv[1]),
        {"collective": make_collective_step, "small_step": make_small_step_work},
        measure_ops_together,
    )
