"""Tasks side by side, and workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from traincast.utils.errors import TraincastError
from traincast.utils.parallel.runner import Died, Job, Workers, run_tasks, split_into_chunks


def _prepare(given):
    return given


def _square(offset, task):
    return offset + task * task


def _dies_once(folder, task):
    """Kills its own worker at task 5, unless somebody has done so before."""
    marker = Path(folder) / "died"
    if task == 5 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def _always_dies(_, task):
    if task == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def _outcomes(job, tasks, **options):
    heard = {}
    run_tasks(job, tasks, lambda number, outcome: heard.setdefault(number, []).append(outcome), **options)
    assert all(len(outcomes) == 1 for outcomes in heard.values())
    return {number: outcomes[0] for number, outcomes in heard.items()}


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_is_done_once(workers):
    job = Job(prepare=_prepare, given=1, work=_square)
    assert _outcomes(job, list(range(20)), workers=workers) == {n: 1 + n * n for n in range(20)}


def test_a_worker_that_is_killed_loses_no_task(tmp_path):
    job = Job(prepare=_prepare, given=str(tmp_path), work=_dies_once)
    assert _outcomes(job, list(range(20)), workers=2) == {n: n for n in range(20)}
    assert (tmp_path / "died").exists()


def test_a_task_that_kills_every_worker_is_told_and_stops_no_other():
    outcomes = _outcomes(Job(prepare=_prepare, given=None, work=_always_dies), list(range(12)), workers=2)
    assert isinstance(outcomes.pop(5), Died)
    assert outcomes == {n: n for n in range(12) if n != 5}


def test_chunks_hold_every_number_once_and_get_smaller():
    made = split_into_chunks(range(101), 4)
    assert [n for chunk in made for n in chunk] == list(range(101))
    assert len(made[-1]) == 1


def test_an_absurd_number_of_workers_is_refused():
    with pytest.raises(TraincastError, match="1 to 1024"):
        run_tasks(Job(prepare=_prepare, given=1, work=_square), [1, 2], print, workers=0)


def _where(_, task):
    return os.getpid()


@pytest.fixture
def slow_tasks(monkeypatch):
    """A clock by which every task takes 20 ms."""
    clock = iter(range(1_000_000))
    monkeypatch.setattr("traincast.utils.parallel.runner.monotonic", lambda: 0.02 * next(clock))


def test_short_runs_stay_in_this_process(slow_tasks):
    pids = set(_outcomes(Job(prepare=_prepare, given=None, work=_where), range(8), workers=2, alone_for=1.0).values())
    assert pids == {os.getpid()}


def test_what_is_left_of_a_long_run_goes_to_others(slow_tasks):
    outcomes = _outcomes(Job(prepare=_prepare, given=None, work=_where), range(30), workers=2, alone_for=0.1)
    assert [number for number, pid in outcomes.items() if pid == os.getpid()] == list(range(6))


def test_where_tasks_run_is_said_and_checked():
    assert Workers(processes=3).describe(2) == "2 processes"
    with pytest.raises(TraincastError, match="1 to 1024"):
        Workers(processes=0)


_PARENT = """
import os, time
from traincast.utils.parallel.runner import Job, run_tasks


def prepare(given):
    return given


def work(given, task):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)


if __name__ == "__main__":
    run_tasks(Job(prepare=prepare, given=None, work=work), [1, 2], lambda number, outcome: None, workers=2)
"""


def test_workers_of_a_parent_that_was_killed_end(tmp_path):
    # given two workers of another process
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    workers = [int(parent.stdout.readline()) for _ in range(2)]

    # when it is killed, then its output ends with the last of its workers, long before they have done their work
    parent.kill()
    try:
        assert parent.communicate(timeout=30)[0] == ""
    except subprocess.TimeoutExpired:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        raise
