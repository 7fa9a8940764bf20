"""Where tasks run, as one value that callers hand on: processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.utils.parallel.runner import Job, OnResult, Outcome, Task, count_workers, run_tasks


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
