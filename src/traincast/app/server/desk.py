"""The desk between routes and workers: the same question is worked on once, answers are remembered, jobs have ids."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import Any

from traincast.app.server.fields import fields
from traincast.app.server.pool import FAILED, FINISHED, RUNNING, WAITING, Job, Pool, described
from traincast.app.server.question import Asked
from traincast.app.server.refusals import Refusal, field_of
from traincast.app.server.store import Store
from traincast.app.server.worker import CHECK

PATIENCE = 5.0
"""Seconds that a request waits for its answer before it is given a job to ask for."""
_MOST_CACHED = 256 << 20  # bytes of answers that are remembered
_MOST_JOBS = 2000  # that are known by id


class Desk:
    """Takes questions; to be used inside of one event loop."""

    def __init__(self, pool: Pool, store: Store) -> None:
        self.pool, self.store = pool, store
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def resume(self) -> None:
        """Takes up the jobs that a server before this one had promised and not finished."""
        for key, kept in self.store.kept_jobs().items():
            if kept["status"] in (WAITING, RUNNING):
                try:
                    self._start(key, Asked(json.loads(kept["question"])), kept["form"])
                except (Refusal, ValueError) as error:
                    print(f"traincast: job {key} cannot be taken up again: {error}", file=sys.stderr)

    async def answer(self, asked: Asked, form: str) -> bytes | str:
        """The answer, or the id of the job that works on it where that takes longer than patience lasts."""
        key = _key(asked, form)
        known = self._answers.get(key)
        if known is not None:
            self._answers.move_to_end(key)
            return known
        job = self._start(key, asked, form)
        try:
            async with asyncio.timeout(PATIENCE):
                await job.finished.wait()
        except TimeoutError:
            self.store.keep_job(key, asked.text, form, job.status)
            return key
        return self._result(job)

    def promise(self, asked: Asked, form: str) -> str:
        """Takes a question on and writes that down; returns the id of its job."""
        key = _key(asked, form)
        if key not in self._answers:
            job = self._start(key, asked, form)
            self.store.keep_job(key, asked.text, form, job.status)
        else:
            self.store.keep_job(key, asked.text, form, FINISHED)
        return key

    def status(self, key: str) -> dict[str, Any]:
        """What is known of a job."""
        job = self._jobs.get(key)
        if job is not None:
            refused = job.refusal.to_dict() if job.refusal else {}
            return {"id": key, **described(job), **refused}
        kept = self._kept(key)
        return {"id": key, "status": kept["status"], "progress": 1.0 if kept["status"] == FINISHED else 0.0,
                "form": kept["form"], "question": json.loads(kept["question"])}  # fmt: skip

    async def result(self, key: str) -> tuple[str, bytes]:
        """The form and the answer of a job that is finished; one that a server before this finished is done again."""
        if key in self._answers:
            return self._form(key), self._answers[key]
        job = self._jobs.get(key)
        if job is None:
            kept = self._kept(key)
            job = self._start(key, Asked(json.loads(kept["question"])), kept["form"])
            await job.finished.wait()
        if not job.finished.is_set():
            raise Refusal(409, f"the job is {job.status}; ask for its status until it is finished", "id")
        return job.form, self._result(job)

    def cancel(self, key: str) -> dict[str, Any]:
        """Ends a job; one that is finished stays so."""
        job = self._jobs.get(key)
        if job is None:
            self._kept(key)
        else:
            self.pool.cancel(job)
        return self.status(key)

    async def check(self, path: Path) -> dict[str, Any]:
        """What an uploaded file is; one that nothing can be made of is refused."""
        job = self.pool.submit(Job(question="", form=CHECK, paths={"file": str(path)}, long=True))
        await job.finished.wait()
        try:
            document: dict[str, Any] = json.loads(self._result(job))
        except Refusal as refusal:
            raise Refusal(422, refusal.message.replace(str(path), "the file"), "body") from None
        return document

    def _start(self, key: str, asked: Asked, form: str) -> Job:
        job = self._jobs.get(key)
        if job is not None and job.status in (WAITING, RUNNING):
            return job
        paths = {upload: str(self.store.path(upload)) for upload in asked.uploads}
        job = self.pool.submit(Job(question=asked.text, form=form, paths=paths, long=asked.is_long))
        self._jobs[key] = job
        while len(self._jobs) > _MOST_JOBS and next(iter(self._jobs.values())).finished.is_set():
            self._jobs.popitem(last=False)
        job.watcher = asyncio.get_running_loop().create_task(self._settle(key, job))
        return job

    async def _settle(self, key: str, job: Job) -> None:
        """Remembers an answer, and writes down what became of a job that was promised."""
        await job.finished.wait()
        if job.status == FINISHED:
            self._answers[key] = job.result
            self._bytes += len(job.result)
            while self._bytes > _MOST_CACHED and len(self._answers) > 1:
                self._bytes -= len(self._answers.popitem(last=False)[1])
        if (self.store.jobs / f"{key}.json").exists() and not self.pool.stopped:
            self.store.keep_job(key, job.question, job.form, job.status)

    def _result(self, job: Job) -> bytes:
        if job.status == FINISHED:
            return job.result
        if job.refusal is None:
            raise RuntimeError(job.result.decode("utf-8", "replace"))
        refusal = job.refusal
        message = refusal.message
        for path in job.paths.values():
            message = message.replace(path, "the file").replace(Path(path).name, "the file")
        question = json.loads(job.question or "{}")
        field = refusal.field or (field_of(message, question, fields()) if job.status == FAILED else "")
        raise Refusal(refusal.status, message, field)

    def _form(self, key: str) -> str:
        job = self._jobs.get(key)
        return job.form if job else self._kept(key)["form"]

    def _kept(self, key: str) -> dict[str, str]:
        kept = self.store.kept_job(key)
        if kept is None:
            raise Refusal(404, "no such job", "id")
        return kept


def _key(asked: Asked, form: str) -> str:
    return sha256(f"{form} {asked.text}".encode()).hexdigest()[:32]
