"""The same tasks on a Ray cluster: a worker or node that dies costs what it had in hand, which others do again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from traincast.utils.errors import TraincastError
from traincast.utils.parallel.runner import HELD, Died, Heard, Job, chunks, work

_ATTEMPTS = 3
LOCAL = "local"
"""As an address: a cluster of this machine alone, begun and ended with the run."""


def run_on_ray(job: Job[Any, Any], tasks: Sequence[Any], heard: Heard, *, address: str) -> None:
    """As `runner.run`, on the cluster at an address ("auto", "ray://host:10001", "local")."""
    try:
        import ray
    except ImportError:
        raise TraincastError("a run on Ray needs it: pip install 'traincast[ray]'") from None
    began = not ray.is_initialized()
    if began:
        _connect(ray, address)
    try:
        _run(ray, job, tasks, heard)
    finally:
        if began:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except TypeError:  # a running cluster has its own dashboard
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().split("\n")[0][:200]
        raise TraincastError(
            f"no Ray cluster at '{address}': {first}; start one with 'ray start' or give '{LOCAL}'"
        ) from None


def _run(ray: Any, job: Job[Any, Any], tasks: Sequence[Any], heard: Heard) -> None:
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    held, run = ray.put(job), uuid4().hex
    remote = ray.remote(max_retries=0)(_chunk)
    waiting = deque(chunks(range(len(tasks)), cpus))
    tries = dict.fromkeys(range(len(tasks)), 0)
    flying: dict[Any, list[int]] = {}
    while waiting or flying:
        while waiting and len(flying) < 2 * cpus:
            chunk = waiting.popleft()
            flying[remote.remote(held, run, [tasks[n] for n in chunk])] = chunk
        done, _ = ray.wait(list(flying), num_returns=1)
        for reference in done:
            chunk = flying.pop(reference)
            try:
                outcomes = ray.get(reference)
            except ray.exceptions.RayError as error:
                _again(error, chunk, waiting, tries, heard)
                continue
            for number, outcome in zip(chunk, outcomes, strict=True):
                heard(number, outcome)


def _again(
    error: Exception, chunk: Sequence[int], waiting: deque[list[int]], tries: dict[int, int], heard: Heard
) -> None:
    for number in chunk:
        tries[number] += 1
        if tries[number] >= _ATTEMPTS:
            heard(number, Died(f"{type(error).__name__} on the cluster"))
        else:
            waiting.append([number])


def _chunk(job: Job[Any, Any], run: str, tasks: Sequence[Any]) -> list[Any]:
    """In a worker of Ray, which may outlive a run: prepares once a run and process."""
    if HELD.get("run") != run:
        HELD.update(run=run, job=job, prepared=job.prepare(job.given))
    return work(tasks)
