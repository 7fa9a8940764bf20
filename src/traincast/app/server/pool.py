"""Worker processes and the jobs they do. A job has progress, a time limit, and can be cancelled: then its process is
ended and another takes its place. Searches never take the last two processes, so that quick questions find one."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from traincast.app.server.refusals import Refusal
from traincast.app.server.worker import BROKEN, CHECK, DONE, PROGRESS, REFUSED, work

_RESERVED = 2  # processes that long jobs leave to quick ones
WAITING, RUNNING, FINISHED, FAILED, CANCELLED = "waiting", "running", "finished", "failed", "cancelled"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the pool may use: processes, jobs that wait, seconds of a quick job, of a long one and of the
    check of an upload, bytes of a process."""

    least: int = 2
    most: int = 8
    waiting: int = 64
    quick_seconds: float = 60.0
    long_seconds: float = 900.0
    check_seconds: float = 120.0
    memory: int = 6 << 30


@dataclass(eq=False)
class Job:
    """A task and what became of it; `finished` is set when there is nothing more to wait for."""

    question: str
    form: str
    paths: Mapping[str, str]
    long: bool
    status: str = WAITING
    progress: float = 0.0
    result: bytes = b""
    refusal: Refusal | None = None
    made: float = field(default_factory=time.time)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    worker: _Worker | None = None
    watcher: asyncio.Task[None] | None = None

    def end(self, status: str, result: bytes = b"", refusal: Refusal | None = None) -> None:
        """Settles the job, unless it is settled already."""
        if not self.finished.is_set():
            self.status, self.result, self.refusal = status, result, refusal
            self.progress = 1.0 if status == FINISHED else self.progress
            self.finished.set()


class _Worker:
    """A process and our end of its pipe."""

    def __init__(self, memory: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["traincast.app.server.warm"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, memory), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        """Ends the process, whatever it does; who listens to the pipe hears its end."""
        with suppress(OSError, ValueError):
            self.process.kill()

    def end(self) -> None:
        """Ends the process and closes the pipe."""
        self.kill()
        with suppress(OSError):
            self.pipe.close()


class Pool:
    """Runs jobs; to be used inside of one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._waiting: list[Job] = []
        self._running: set[Job] = set()
        self._idle: list[_Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = False

    def start(self) -> None:
        """Starts the first processes."""
        self._idle = [_Worker(self.limits.memory) for _ in range(self.limits.least)]

    async def stop(self) -> None:
        """Ends all processes; jobs that were running are cancelled."""
        self.stopped = True
        for job in [*self._waiting, *self._running]:
            self.cancel(job)
        for worker in self._idle:
            worker.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def counts(self) -> dict[str, int]:
        """How many jobs run and wait."""
        return {"running": len(self._running), "waiting": len(self._waiting)}

    def submit(self, job: Job) -> Job:
        """Takes a job; too many that wait are refused."""
        if len(self._waiting) >= self.limits.waiting:
            raise Refusal(429, "too many questions are waiting; ask again in a few seconds")
        self._waiting.append(job)
        self._dispatch()
        return job

    def cancel(self, job: Job) -> None:
        """Ends a job that waits or runs."""
        if job in self._waiting:
            self._waiting.remove(job)
        job.end(CANCELLED, refusal=Refusal(409, "the job was cancelled"))
        if job.worker is not None:
            job.worker.kill()

    def _dispatch(self) -> None:
        """Gives waiting jobs to processes, starting further ones where there are none idle."""
        for job in list(self._waiting):
            busy = len(self._running)
            searching = sum(other.long for other in self._running)
            if busy >= self.limits.most:
                return
            if job.long and searching >= max(self.limits.most - _RESERVED, 1):
                continue
            self._waiting.remove(job)
            job.worker = self._idle.pop() if self._idle else _Worker(self.limits.memory)
            job.status = RUNNING
            self._running.add(job)
            task = asyncio.get_running_loop().create_task(self._run(job, job.worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job, worker: _Worker) -> None:
        seconds = self._seconds(job)
        sound = False
        try:
            async with asyncio.timeout(seconds):
                await self._talk(job, worker)
            sound = True
        except TimeoutError:
            job.end(FAILED, refusal=Refusal(422, f"took longer than {seconds:g} s; ask for less", "workload"))
        except (EOFError, OSError):
            job.end(FAILED, refusal=Refusal(422, "the process that worked on it ended; ask for less", "workload"))
        finally:
            self._running.discard(job)
            job.worker = None
            self._keep(worker, sound=sound)
            self._dispatch()

    def _seconds(self, job: Job) -> float:
        if job.form == CHECK:
            return self.limits.check_seconds
        return self.limits.long_seconds if job.long else self.limits.quick_seconds

    async def _talk(self, job: Job, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        task = {"question": job.question, "form": job.form, "paths": json.dumps(dict(job.paths))}
        await loop.run_in_executor(None, worker.pipe.send_bytes, json.dumps(task).encode())
        while True:
            message = await _heard(worker.pipe)
            kind, rest = message[:1], message[1:]
            if kind == PROGRESS:
                job.progress = float(rest)
            elif kind == DONE:
                job.end(FINISHED, rest)
                return
            elif kind == REFUSED:
                job.end(FAILED, refusal=Refusal(422, rest.decode("utf-8", "replace")))
                return
            else:
                assert kind == BROKEN, kind
                job.end(FAILED, result=rest)
                return

    def _keep(self, worker: _Worker, *, sound: bool) -> None:
        """Keeps a process for the next job; one that was ended is replaced where there are too few."""
        if sound and worker.process.is_alive() and not worker.pipe.closed:
            self._idle.append(worker)
            return
        worker.end()
        if not self.stopped and not self._waiting and len(self._idle) + len(self._running) < self.limits.least:
            self._idle.append(_Worker(self.limits.memory))


async def _heard(pipe: Connection) -> bytes:
    """The next message of a worker, waited for without a thread."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    number = pipe.fileno()

    def arrived() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(number, arrived)
    try:
        await ready
    finally:
        loop.remove_reader(number)
    return await loop.run_in_executor(None, pipe.recv_bytes)


def described(job: Job) -> dict[str, Any]:
    """A job as plain data, without its answer."""
    return {"status": job.status, "progress": round(job.progress, 4), "form": job.form,
            "question": json.loads(job.question) if job.question else {}}  # fmt: skip
