"""Jobs without HTTP: what is remembered, what is tried again, and what becomes of processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager

import pytest

from traincast.app.server import jobs as module
from traincast.app.server.fields import parse_request
from traincast.app.server.guard import Rejection
from traincast.app.server.jobs import CANCELLED, FAILED, FINISHED, Jobs, Limits

DLRM = "{bottom_mlp: [13, 32], top_mlp: [1], embedding_dim: 32, rows_per_table: [1000], lookups_per_table: 4}"
SLOW = [("of", "sharding"), ("workload", "dlrm-2022-788"), ("on", "dgx-a100"), ("gpus", "8")]


def question(batch_size, **more):
    return parse_request([("workload", "dlrm-default"), ("on", "v100"), ("batch_size", str(batch_size)), *more.items()])


@asynccontextmanager
async def running(**limits):
    jobs = Jobs(Limits(quick=1, long=1, **limits))
    jobs.start()
    try:
        yield jobs
    finally:
        await jobs.stop()


async def finished(jobs, key):
    await jobs.find(key).done
    return jobs.find(key)


async def when_running(jobs, key, but=None):
    """The worker of a job, once it has one, or one other than `but`."""
    while (worker := jobs.find(key).worker) in (None, but):
        await asyncio.sleep(0.01)
    return worker


def end_process(worker):
    os.kill(worker.process.pid, signal.SIGKILL)


def test_an_answer_is_remembered_and_a_refusal_is_tried_again():
    async def scenario():
        async with running() as jobs:
            first = await finished(jobs, jobs.ask(question(64), "answer", {}))
            again = jobs.find(jobs.ask(question(64), "answer", {}))
            wrong = await finished(jobs, jobs.ask(question(64, seq_len="128"), "answer", {}))
            other = await finished(jobs, jobs.ask(question(64, seq_len="128"), "answer", {}))
            return first, again, wrong, other

    first, again, wrong, other = asyncio.run(scenario())

    assert first is again and first.status == FINISHED
    assert json.loads(first.answer())["batch_size"] == 64
    assert wrong is not other and wrong.status == other.status == FAILED
    with pytest.raises(Rejection) as refused:
        wrong.answer()
    assert (refused.value.status, refused.value.field) == (422, "seq_len")


def test_of_many_jobs_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "_MOST_JOBS", 2)

    async def scenario():
        async with running() as jobs:
            keys = []
            for batch in (65, 66, 67):
                keys.append(jobs.ask(question(batch), "answer", {}))
                await finished(jobs, keys[-1])
            return jobs, keys

    jobs, (oldest, *others) = asyncio.run(scenario())

    assert [jobs.find(key).status for key in others] == [FINISHED] * 2
    with pytest.raises(Rejection, match="no such job"):
        jobs.find(oldest)


def test_a_process_that_dies_twice_costs_its_job_only():
    async def scenario():
        async with running() as jobs:
            key = jobs.ask(parse_request(SLOW), "answer", {})
            first = await when_running(jobs, key)
            end_process(first)
            end_process(await when_running(jobs, key, but=first))
            died = await finished(jobs, key)
            answered = await finished(jobs, jobs.ask(question(68), "answer", {}))
            slow = jobs.ask(parse_request([*SLOW, ("batch_size", "512")]), "answer", {})
            await when_running(jobs, slow)
            jobs.cancel(slow)
            return died, answered, await finished(jobs, slow)

    died, answered, cancelled = asyncio.run(scenario())

    assert died.status == FAILED and "the process that worked on it ended" in died.refusal.message
    assert answered.status == FINISHED and cancelled.status == CANCELLED


def test_a_job_whose_process_dies_once_is_done_once_more(monkeypatch):
    answer, ended = module._Worker.answer, []

    def answer_or_die(self, job, seconds):
        if not ended:
            ended.append(self)
            end_process(self)
        return answer(self, job, seconds)

    monkeypatch.setattr(module._Worker, "answer", answer_or_die)

    async def scenario():
        async with running() as jobs:
            return await finished(jobs, jobs.ask(question(70), "answer", {}))

    job = asyncio.run(scenario())

    assert len(ended) == 1 and job.status == FINISHED
    assert json.loads(job.answer())["batch_size"] == 70


def test_no_process_is_left_when_it_has_stopped():
    async def scenario():
        async with running() as jobs:
            await finished(jobs, jobs.ask(question(69), "answer", {}))
            await when_running(jobs, jobs.ask(parse_request(SLOW), "answer", {}))
            processes = [worker.process for worker in jobs._workers]
        return jobs, processes

    jobs, processes = asyncio.run(scenario())

    assert len(processes) == 2
    for process in processes:
        process.join(30)
        assert not process.is_alive()
    assert jobs.count() == {"running": 0, "waiting": 0}


def test_an_upload_that_cannot_be_read_is_named_without_its_place(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")

    async def scenario():
        async with running() as jobs:
            return await jobs.check(tmp_path / "bad.yaml")

    with pytest.raises(Rejection) as refused:
        asyncio.run(scenario())

    assert (refused.value.status, refused.value.field) == (422, "body")
    assert str(tmp_path) not in refused.value.message


def test_an_upload_is_checked_while_searches_run_and_wait(tmp_path):
    (tmp_path / "m.yaml").write_text(DLRM)

    async def scenario():
        async with running(waiting=1) as jobs:
            searching = jobs.ask(parse_request(SLOW), "answer", {})
            await when_running(jobs, searching)
            jobs.ask(parse_request([*SLOW[:-1], ("gpus", "4")]), "answer", {})  # the one that may wait
            known = await jobs.check(tmp_path / "m.yaml")
            return known, jobs.count()

    known, held = asyncio.run(scenario())
    assert known["kind"]
    assert held == {"running": 1, "waiting": 1}


def test_searches_leave_the_processor_to_quick_questions():
    async def scenario():
        async with running() as jobs:
            slow, quick = jobs.ask(parse_request(SLOW), "answer", {}), jobs.ask(question(71), "answer", {})
            searching = await when_running(jobs, slow)
            await finished(jobs, quick)
            answering = next(worker for worker in jobs._workers if worker is not searching)
            for _ in range(500):  # a process sets its priority when it has started
                if os.getpriority(os.PRIO_PROCESS, searching.process.pid) > os.getpriority(os.PRIO_PROCESS, 0):
                    break
                await asyncio.sleep(0.01)
            return [os.getpriority(os.PRIO_PROCESS, one.process.pid) for one in (answering, searching)]

    answering, searching = asyncio.run(scenario())
    assert answering == os.getpriority(os.PRIO_PROCESS, 0)
    assert searching == min(19, answering + 15)
