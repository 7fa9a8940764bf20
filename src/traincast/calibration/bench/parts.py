"""The parts of a calibration alongside single ops: what the host costs, what is copied, what ranks exchange."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from traincast.calibration.bench.collectives import (
    list_job_collectives,
    make_collective_job,
    plan_collectives,
    plan_copies,
)
from traincast.calibration.bench.device import Device, Reference, Series
from traincast.calibration.bench.ranks import run_ranks
from traincast.calibration.bench.store import Store
from traincast.costs.cpu.collectives import CpuCollective, make_collective_signature
from traincast.costs.cpu.samples import Sample
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.calibration.bench.collectives import CopyTask
    from traincast.calibration.bench.inside import SmallStep

AGAIN = "-again"
"""Behind the key of what is measured a second time: neighbours, and where operands happen to be, are others then."""
EXCHANGE_SECONDS = 0.4
"""Of repetitions of one collective."""
_JOB_SECONDS = 0.7  # with buffers, warm-up and the reference alongside them
_STEP_SECONDS, _COPY_SECONDS = 0.5, 0.15  # of a tiny step with its capture, of a copy
_FIRST_SHARE = 0.6  # of the time of small steps, which are captured the first time they are run
_TOGETHER_SECONDS = 1.5  # of a small step on all cores, with its capture
_START_SECONDS = 15.0  # that ranks may take to find each other
_MOST_TRACES = 12  # of small steps on a GPU: their ops are the same few
_MOST_STEPS, _MOST_COPIES, _MOST_EXCHANGES = 120, 60, 280  # more say nothing new of a dozen curves


def count_possible_ranks(device: Device, most: int | None = None) -> int:
    """How many processes of one thread each this machine can measure together, at `most` this many (None: eight GPUs,
    two cores); one exchanges nothing."""
    if device.kind == "cuda":
        import torch

        return min(torch.cuda.device_count(), most or 8)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, most or 2)


def plan_parts(kind: str, host: float, together: float, copies: float, exchanges: float) -> dict[str, int]:
    """How many measurements a kind of device gets in this many seconds of each part; together and of collectives, where
    it has two cores or GPUs."""
    parts = {
        "host steps": min(_MOST_STEPS if kind == "cpu" else _MOST_TRACES, round(host / _STEP_SECONDS)),
        "small steps together": min(_MOST_STEPS, round(together / _TOGETHER_SECONDS)) if kind == "cpu" else 0,
        "copies": min(_MOST_COPIES, round(copies / _COPY_SECONDS)) if kind == "cuda" else 0,
        "collectives": min(_MOST_EXCHANGES, round(exchanges / _JOB_SECONDS)),
    }
    return {name: number for name, number in parts.items() if number}


def measure_host(device: Device, store: Store, seed: int, seconds: float, progress: Callable[[], None]) -> list[str]:
    """Small steps: on a CPU their ops inside, and what the host takes alongside them, each at two times; on a GPU its
    overheads, traced. What to say where that cannot be done."""
    from traincast.calibration.bench.inside import draw_small_steps

    reference, start = Reference(device), time.monotonic()
    most = _MOST_STEPS if device.kind == "cpu" else _MOST_TRACES
    drawn = list(islice((s for s in draw_small_steps(seed) if device.kind == "cpu" or not s.tables), most))
    for turn, share in (("", _FIRST_SHARE), (AGAIN, 1.0)) if device.kind == "cpu" else (("", 1.0),):
        for small in drawn:
            if time.monotonic() - start > share * seconds or (turn and small.name not in store):
                break
            if small.name + turn not in store:  # that of the host comes last: a step that was interrupted is run again
                notes = _measure_small_step(device, reference, small, store, turn)
                if notes:
                    return notes
            progress()
    return []


def _measure_small_step(device: Device, reference: Reference, small: SmallStep, store: Store, turn: str) -> list[str]:
    from traincast.calibration.bench.inside import measure_inside, trace_overheads

    measured = measure_inside if device.kind == "cpu" else trace_overheads
    try:
        rows = list(measured(device, reference, small))
    except (RuntimeError, TraincastError) as error:  # a GPU whose profiler sees nothing has its kernels still
        return [f"the host's overheads could not be measured: {' '.join(str(error).split())[:160]}"]
    for key, sample in rows:
        if key + turn not in store:
            store.append(key + turn, sample)
    return []


def measure_together(
    device: Device, store: Store, seed: int, seconds: float, progress: Callable[[], None]
) -> list[str]:
    """The first small steps once more, on all cores at once under DDP: what ops lose to neighbours that want the same
    caches and memory, and what the host takes for DDP and for calling collectives. On GPUs kernels hide it."""
    ranks = count_possible_ranks(device)
    if device.kind != "cpu" or ranks < 2:
        return []
    from traincast.calibration.bench.inside import (
        capture_first,
        draw_small_steps,
        make_inside_key,
        make_inside_samples,
        make_rank_step_sample,
    )

    first = list(islice(draw_small_steps(seed), min(_MOST_STEPS, round(seconds / _TOGETHER_SECONDS))))
    steps = {small.name: small for small in first if make_inside_key(small, ranks) not in store}

    def hear(result: dict[str, Any]) -> None:
        series = Series(*(np.array(result[name]) for name in ("thread", "thread", "beside", "beside")))
        times = {clock: np.array(result[f"op_{clock}"]) for clock in ("wall", "busy")}
        small = steps[result["small_step"]["name"]]
        walls = Series(*(np.array(result[name]) for name in ("together", "thread", "beside_wall", "beside")))
        samples = make_inside_samples(small, series, result["names"], times, ranks)
        for key, sample in (make_rank_step_sample(small, walls, ranks), *samples):
            if key not in store:
                store.append(key, sample)
        progress()

    capture_first(steps.values(), ranks)
    jobs = [{"small_step": small.to_dict(), "seconds": 0.0, "most": 1} for small in steps.values()]
    return _run_rank_jobs(jobs, ranks, hear, seconds, device) if jobs else []


def _run_rank_jobs(
    jobs: list[dict[str, Any]], ranks: int, hear: Callable[[dict[str, Any]], None], seconds: float, device: Device
) -> list[str]:
    """Jobs of several ranks; what to say where they cannot be run: a cluster's rules may forbid sockets, and single ops
    can be measured all the same."""
    try:
        run_ranks(jobs, ranks, each=hear, seconds=seconds + _START_SECONDS, device=device.kind)
    except TraincastError as error:
        return [f"not all that ranks do together could be measured: {error}"]
    return []


def measure_copies(device: Device, store: Store, seed: int, seconds: float, progress: Callable[[], None]) -> list[str]:
    """Copies between host and device, until the time is over; what to say of those that could not be made."""
    from traincast.calibration.bench.bench import measure_copy

    reference, end = Reference(device), time.monotonic() + seconds
    for task in _list_first_copies(device.kind, seed):
        if time.monotonic() > end:
            break
        if task.key not in store:
            try:
                sample = measure_copy(device, reference, task)
            except (RuntimeError, TraincastError) as error:  # containers limit memory that is pinned
                return [f"a copy {task.direction}, {task.memory}, failed: {' '.join(str(error).split())[:120]}"]
            store.append(task.key, sample)
        progress()
    return []


def _list_first_copies(kind: str, seed: int) -> Iterator[CopyTask]:
    for _, task in zip(range(_MOST_COPIES), plan_copies(kind, seed), strict=False):
        yield task


def measure_collectives(
    device: Device, store: Store, seed: int, seconds: float, progress: Callable[[], None]
) -> list[str]:
    """Collectives between as many ranks as this machine has cores or GPUs for; what to say when there are none."""
    ranks = count_possible_ranks(device)
    if ranks < 2:
        return ["collectives were not measured: one core or GPU has nobody to communicate with"]
    jobs = _list_next_jobs(store, ranks, seed, round(seconds / _JOB_SECONDS))

    def hear(result: dict[str, Any]) -> None:
        exchanges = list_job_collectives(result, ranks)
        store.append(make_collective_key(exchanges), make_collective_sample(result, exchanges))
        progress()

    return _run_rank_jobs(jobs, ranks, hear, seconds, device) if jobs else []


def _list_next_jobs(store: Store, ranks: int, seed: int, number: int) -> list[dict[str, Any]]:
    """The next this many collectives that the store does not hold."""
    jobs: list[dict[str, Any]] = []
    for _, exchanges in zip(range(_MOST_EXCHANGES), plan_collectives(ranks, seed), strict=False):
        if len(jobs) >= number:
            break
        if make_collective_key(exchanges) not in store:
            jobs.append(make_collective_job(exchanges, EXCHANGE_SECONDS))
    return jobs


def make_collective_key(exchanges: list[CpuCollective]) -> str:
    """A name of a collective that is the same in every run."""
    first = exchanges[0]
    sent = "-".join(str(exchange.sent[0]) for exchange in exchanges if exchange.sent)
    return f"exchange-{len(exchanges)}-{first.kind}-{first.message_bytes}{sent and '-' + sent}"


def make_collective_sample(result: dict[str, Any], exchanges: list[CpuCollective]) -> Sample:
    """What ranks measured of a collective: of the slowest rank on the wall's clock, processor time of a whole rank."""
    wall, busy, reference, reference_busy = (
        np.array(result[name]) for name in ("step", "busy", "reference", "reference_busy")
    )
    ratios = wall / reference
    middle = float(np.median(ratios))
    return Sample(
        signature=make_collective_signature(exchanges), between=0, access="", wall=middle * float(np.median(reference)),
        busy=float(np.median(busy / reference) * np.median(reference)), reference_wall=float(np.median(reference)),
        reference_busy=float(np.median(reference_busy)),
        spread=1.4826 * float(np.median(np.abs(ratios / middle - 1.0))), ranks=len(exchanges),
    )  # fmt: skip
