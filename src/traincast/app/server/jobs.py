"""Jobs and the processes that do them. A job has progress and limits of time and memory, can be cancelled, and is
remembered by the question it answers.

Every thread of two pools drives one worker process. Quick questions have a pool of their own, so that searches never
keep them waiting. A job that takes too long or is cancelled is ended with its process; the thread starts another.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from traincast.app.server.fields import ParsedRequest, list_fields
from traincast.app.server.guard import Rejection, find_field
from traincast.app.server.worker import CHECK, DONE, PROGRESS, REFUSED, serve_requests

WAITING, RUNNING, FINISHED, FAILED, CANCELLED = "waiting", "running", "finished", "failed", "cancelled"
_UNFINISHED = (WAITING, RUNNING)
_MOST_BYTES = 256 << 20  # of results that are remembered
_MOST_JOBS = 2000  # that are remembered
QUICK, LONG = "quick", "long"
"""Kinds of jobs that wait for each other, beside `CHECK`."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Processes for quick questions and for long ones (searches, curves, questions about uploads; one more checks
    uploads), jobs of each that may wait, seconds of a quick job, of a long one and of the check of an upload, bytes
    that a process may map."""

    quick: int = 2
    long: int = 6
    waiting: int = 64
    quick_seconds: float = 60.0
    long_seconds: float = 900.0
    check_seconds: float = 120.0
    memory: int = 6 << 30


@dataclass(eq=False)
class Job:
    """A question to answer in a form, with the files of its uploads by id; `done` is awaited for its end."""

    question: str
    form: str
    paths: Mapping[str, str]
    long: bool
    status: str = WAITING
    progress: float = 0.0
    result: bytes = b""
    refusal: Rejection | None = None
    worker: _Worker | None = None
    done: asyncio.Future[None] = field(init=False)

    @property
    def pool(self) -> str:
        """Whose turn it waits for: an upload is checked whatever is searched meanwhile."""
        return CHECK if self.form == CHECK else LONG if self.long else QUICK

    def describe(self) -> dict[str, Any]:
        """The job as plain data, without its result."""
        refused = self.refusal.to_dict() if self.refusal else {}
        return {"status": self.status, "progress": round(self.progress, 4), "form": self.form,
                "question": json.loads(self.question or "{}"), **refused}  # fmt: skip

    def answer(self) -> bytes:
        """What the job made; raises what it was rejected with."""
        if self.status in _UNFINISHED:
            raise Rejection(409, f"the job is {self.status}; ask for its status until it is finished", "id")
        if self.status == FINISHED:
            return self.result
        if self.refusal is None:
            raise RuntimeError(self.result.decode("utf-8", "replace"))
        message, wrong = self.refusal.message, self.refusal.field
        for path in self.paths.values():
            message = message.replace(path, "the file").replace(Path(path).name, "the file")
        if self.status == FAILED and not wrong:
            wrong = find_field(message, json.loads(self.question or "{}"), list_fields())
        raise Rejection(self.refusal.status, message, wrong)


class _Worker:
    """A process and our end of its pipe."""

    def __init__(self, memory: int, *, is_long: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["traincast.app.server.warm"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve_requests, args=(theirs, memory), kwargs={"is_long": is_long}, daemon=True
        )
        self.process.start()
        theirs.close()
        self.killed = False

    def answer(self, job: Job, seconds: float) -> tuple[bytes, bytes]:
        """The kind of the worker's last message, and the message."""
        task = {"question": job.question, "form": job.form, "paths": json.dumps(dict(job.paths))}
        self.pipe.send_bytes(json.dumps(task).encode())
        end = monotonic() + seconds
        while self.pipe.poll(max(end - monotonic(), 0.0)):
            message = self.pipe.recv_bytes()
            if message[:1] != PROGRESS:
                return message[:1], message[1:]
            job.progress = float(message[1:])
        raise TimeoutError

    def kill(self) -> None:
        """Ends the process, whatever it does; the thread that listens to its pipe hears the end."""
        self.killed = True
        with suppress(OSError, ValueError):
            self.process.kill()


class Jobs:
    """Takes questions; to be used inside of one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        sizes = {QUICK: limits.quick, LONG: limits.long, CHECK: 1}
        self._pools = {name: ThreadPoolExecutor(size) for name, size in sizes.items()}
        self._own = threading.local()  # the worker of each thread
        self._lock = threading.Lock()  # of the status and the worker of jobs, and of the list of workers
        self._workers: set[_Worker] = set()
        self._unfinished: set[Job] = set()
        self._known: OrderedDict[str, Job] = OrderedDict()
        self._stopped = False

    def start(self) -> None:
        """Starts the first process, so that the first question finds it."""
        self._pools[QUICK].submit(self._worker, is_long=False)

    async def stop(self) -> None:
        """Ends all processes; jobs that run or wait are cancelled."""
        self._stopped = True
        for job in list(self._unfinished):
            self._cancel(job)
        with self._lock:
            for worker in self._workers:
                worker.kill()
        for pool in self._pools.values():
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    def count(self) -> dict[str, int]:
        """How many jobs run and wait."""
        statuses = [job.status for job in self._unfinished]
        return {status: statuses.count(status) for status in (RUNNING, WAITING)}

    def ask(self, asked: ParsedRequest, form: str, paths: Mapping[str, str]) -> str:
        """The key of the job that answers a question in a form; the same question is worked on once."""
        key = sha256(f"{form} {asked.text}".encode()).hexdigest()[:32]
        job = self._known.get(key)
        if job is None or job.status in (FAILED, CANCELLED):
            self._known[key] = self._submit(Job(asked.text, form, paths, asked.is_long))
            self._forget_oldest()
        self._known.move_to_end(key)
        return key

    def find(self, key: str) -> Job:
        """The job of a key."""
        if key not in self._known:
            raise Rejection(404, "no such job", "id")
        return self._known[key]

    def cancel(self, key: str) -> Job:
        """Ends a job; one that is finished stays so."""
        job = self.find(key)
        self._cancel(job)
        return job

    async def check(self, path: Path) -> dict[str, Any]:
        """What an uploaded file is; one that cannot be read is rejected."""
        job = self._submit(Job("", CHECK, {"file": str(path)}, long=True))
        await job.done
        try:
            document: dict[str, Any] = json.loads(job.answer())
        except Rejection as rejection:
            raise Rejection(422, rejection.message.replace(str(path), "the file"), "body") from None
        return document

    def _submit(self, job: Job) -> Job:
        waiting = sum(one.status == WAITING for one in self._unfinished if one.pool == job.pool)
        if waiting >= self.limits.waiting or self._stopped:
            raise Rejection(429, "too many questions are waiting; ask again in a few seconds")
        self._unfinished.add(job)
        job.done = asyncio.get_running_loop().run_in_executor(self._pools[job.pool], self._run, job)
        job.done.add_done_callback(lambda _: self._forget_job(job))
        return job

    def _forget_job(self, job: Job) -> None:
        """A job that ended is waited for no longer, and its result takes room."""
        self._unfinished.discard(job)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        size = sum(len(job.result) for job in self._known.values())
        for key, job in list(self._known.items()):
            if len(self._known) <= _MOST_JOBS and size <= _MOST_BYTES:
                return
            if job.status not in _UNFINISHED:
                size -= len(self._known.pop(key).result)

    def _cancel(self, job: Job) -> None:
        self._end(job, CANCELLED, rejection=Rejection(409, "the job was cancelled"))
        with self._lock:
            if job.worker is not None:
                job.worker.kill()

    def _end(self, job: Job, status: str, result: bytes = b"", rejection: Rejection | None = None) -> None:
        """Settles a job, unless it is settled already."""
        with self._lock:
            if job.status in _UNFINISHED:
                job.status, job.result, job.refusal = status, result, rejection
                job.progress = 1.0 if status == FINISHED else job.progress

    # what follows runs in the threads of the pools

    def _run(self, job: Job) -> None:
        """Does a job; one whose process is ended by somebody else is done once more."""
        for last in (False, True):
            if self._try(job, last=last):
                return

    def _try(self, job: Job, *, last: bool) -> bool:
        """Whether a job came to its end, whatever that is; with `last` it does."""
        try:
            worker = self._worker(is_long=job.pool == LONG)
        except OSError as error:
            self._end(job, FAILED, rejection=Rejection(503, f"no process could be started: {error.strerror}"))
            return True
        with self._lock:
            if job.status == CANCELLED:
                return True
            job.status, job.worker = RUNNING, worker
        seconds = self._seconds(job)
        try:
            kind, rest = worker.answer(job, seconds)
        except TimeoutError:
            worker.kill()
            rejection = Rejection(422, f"took longer than {seconds:g} s; ask for less", "workload")
            self._end(job, FAILED, rejection=rejection)
        except (EOFError, OSError):
            if not last and not worker.killed:
                worker.kill()
                return False
            worker.kill()
            rejection = Rejection(422, "the process that worked on it ended; ask for less", "workload")
            self._end(job, FAILED, rejection=rejection)
        else:
            refused = Rejection(422, rest.decode("utf-8", "replace")) if kind == REFUSED else None
            self._end(job, FINISHED if kind == DONE else FAILED, rest, refused)
        finally:
            with self._lock:
                job.worker = None
        return True

    def _seconds(self, job: Job) -> float:
        if job.form == CHECK:
            return self.limits.check_seconds
        return self.limits.long_seconds if job.long else self.limits.quick_seconds

    def _worker(self, *, is_long: bool) -> _Worker:
        """The process of this thread; one that was ended is replaced."""
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is not None and not worker.killed and worker.process.is_alive():
            return worker
        started = self._own.worker = _Worker(self.limits.memory, is_long=is_long)
        with self._lock:
            if worker is not None:
                worker.pipe.close()
                self._workers.discard(worker)
            self._workers.add(started)
        if self._stopped:
            started.kill()
        return started
