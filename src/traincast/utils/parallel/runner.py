"""Tasks run side by side in processes: small chunks, results as they come, and no task lost to a worker that dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from traincast.utils.errors import TraincastError

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

MOST_WORKERS = 1024
_AHEAD = 2  # chunks a worker that wait for it: one runs, one is there when it is done
_LARGEST_CHUNK = 2  # tasks: what a run that is killed may lose of each worker, times two


@dataclass(frozen=True, kw_only=True)
class Job(Generic[Task, Outcome]):
    """What is done with every task. `prepare` makes what a worker needs once, from `given`; `run_chunk` takes that and
    one task. All of them are sent to other processes: functions of modules, plain values."""

    prepare: Callable[[Any], Any]
    given: Any
    work: Callable[[Any, Task], Outcome]


@dataclass(frozen=True)
class Died:
    """The outcome of a task that ended its worker, every time it was tried."""

    reason: str


OnResult = Callable[[int, Any], None]
"""Takes the number of a task and its outcome, or `Died`."""


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(
    job: Job[Task, Outcome],
    tasks: Sequence[Task],
    on_result: OnResult,
    *,
    workers: int | None = None,
    alone_for: float = 0.0,
) -> None:
    """Does every task once and tells each outcome as it comes, in any order. One worker is this process itself; so are
    all while `alone_for` seconds have not passed or what is left then takes no longer: others must be worth their
    start."""
    number = count_workers(workers)
    if number == 1 or len(tasks) < 2 or HELD or multiprocessing.current_process().daemon:  # workers have none
        _run_alone(job, tasks, on_result, float("inf"))
        return
    done = _run_alone(job, tasks, on_result, alone_for) if alone_for > 0 else 0
    number = min(number, len(tasks) - done)
    if number:
        _run_in_processes(job, tasks, deque(split_into_chunks(range(done, len(tasks)), number)), on_result, number)


def count_workers(asked: int | None) -> int:
    """How many workers are asked for: one per core unless said."""
    number = count_cores() if asked is None else asked
    if not 1 <= number <= MOST_WORKERS:
        raise TraincastError(f"`workers` {number} is out of range; give 1 to {MOST_WORKERS}")
    return number


def _run_in_processes(
    job: Job[Task, Outcome], tasks: Sequence[Task], waiting: deque[list[int]], on_result: OnResult, number: int
) -> None:
    """Chunks of tasks in this many processes."""
    suspects: list[int] = []
    while waiting:
        suspects += _run_until_worker_dies(job, tasks, waiting, on_result, number)
    while suspects:  # one at a time, so that a worker that dies names its task
        alone = deque([[suspect] for suspect in suspects])
        broken = _run_until_worker_dies(job, tasks, alone, on_result, 1, ahead=1)
        for suspect in broken:
            on_result(suspect, Died("its worker died, each time it was tried"))
        suspects = [chunk[0] for chunk in alone]


def split_into_chunks(numbers: Sequence[int], workers: int) -> list[list[int]]:
    """Neighbours together, since they share what was prepared; smaller ones at the end, so that workers end together.

    >>> [len(chunk) for chunk in chunks(range(9), 2)]
    [2, 2, 2, 1, 1, 1]
    """
    made, start = [], 0
    while start < len(numbers):
        left = len(numbers) - start
        size = max(1, min(_LARGEST_CHUNK, -(-left // (2 * workers))))
        made.append(list(numbers[start : start + size]))
        start += size
    return made


def _run_alone(job: Job[Task, Outcome], tasks: Sequence[Task], on_result: OnResult, patience: float) -> int:
    """Works in this process until all is done, or `patience` seconds have passed and more than as many are left; how
    many tasks were done."""
    began = monotonic()
    prepared = job.prepare(job.given) if tasks else None
    for number, task in enumerate(tasks):
        on_result(number, job.work(prepared, task))
        took, left = monotonic() - began, len(tasks) - number - 1
        if took > patience and left > 1 and took * left / (number + 1) > patience:
            return number + 1
    return len(tasks)


def _run_until_worker_dies(
    job: Job[Task, Outcome], tasks: Sequence[Task], waiting: deque[list[int]], on_result: OnResult, workers: int,
    *, ahead: int = _AHEAD,
) -> list[int]:  # fmt: skip
    """Works on chunks until none is left, or a worker dies; gives the tasks that were in hand then."""
    flying: dict[Future[list[Outcome]], list[int]] = {}
    pool = ProcessPoolExecutor(workers, _choose_start_context(), initializer=_initialise_worker, initargs=(job,))
    try:
        while waiting or flying:
            while waiting and len(flying) < ahead * workers:
                flying[pool.submit(run_chunk, [tasks[n] for n in waiting[0]])] = waiting[0]
                waiting.popleft()  # now it is in the pool's hands: a pool that is broken takes none
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            for future in done:
                outcomes = future.result()
                for number, outcome in zip(flying.pop(future), outcomes, strict=True):
                    on_result(number, outcome)
        return []
    except BrokenProcessPool:
        return [number for chunk in flying.values() for number in chunk]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _choose_start_context() -> Any:
    """Forked workers begin with all that is loaded; where that is not safe, they begin anew."""
    forks = "fork" in multiprocessing.get_all_start_methods() and "torch" not in sys.modules
    return multiprocessing.get_context("fork" if forks and threading.active_count() == 1 else "spawn")


HELD: dict[str, Any] = {}
"""In a worker: the job and what was prepared for it; elsewhere empty."""


def _initialise_worker(job: Job[Any, Any]) -> None:
    # Ctrl-C is for the parent, which ends its workers; handlers that a fork brought along are the parent's too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    HELD["job"], HELD["prepared"] = job, job.prepare(job.given)


def _exit_with_parent() -> None:
    """A worker whose parent was killed would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_chunk(tasks: Sequence[Any]) -> list[Any]:
    """In a worker: the outcomes of tasks."""
    job, prepared = HELD["job"], HELD["prepared"]
    return [job.work(prepared, task) for task in tasks]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """`processes` of this machine (None: one per core). They begin when this process has worked `alone_for` seconds and
    as much is left."""

    processes: int | None = None
    alone_for: float = 0.0

    def __post_init__(self) -> None:
        count_workers(self.processes)

    def run_tasks(self, job: Job[Task, Outcome], tasks: Sequence[Task], on_result: OnResult) -> None:
        """Does every task once and tells each outcome as it comes, in any order."""
        run_tasks(job, tasks, on_result, workers=self.processes, alone_for=self.alone_for)

    def describe(self, tasks: int) -> str:
        """In words, for this many tasks that do not begin alone."""
        number = max(1, min(count_workers(self.processes), tasks))
        return f"{number} process{'es' * (number > 1)}"


_SHORT = 1.0  # seconds: what takes no longer is not worth the start of other processes


def search_workers(processes: int | None = None) -> Workers:
    """Those of a search, which is over in a second or two most of the time."""
    return Workers(processes=processes, alone_for=_SHORT)


SEARCH = search_workers()
"""Where searches run unless something else is said."""
