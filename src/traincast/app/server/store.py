"""What the server keeps on disk, and promises to keep: uploads that it accepted, and jobs that it took on.

A file is there whole or not at all; its id is the hash of its content and name, so that uploading it again changes
nothing. It lies in a folder of that id, under the plain characters of its name.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from traincast.app.server.refusals import Refusal
from traincast.utils.errors import TraincastError, printable
from traincast.utils.files.reading import shown_path
from traincast.utils.files.writing import write_json

SUFFIXES = (".json.gz", ".json", ".tc", ".yaml", ".yml", ".et.gz", ".et")
"""Endings of files that are taken: traces, configurations, workloads, descriptions."""
_ID = re.compile(r"[0-9a-f]{32}")
_MOST_NAME = 120
_STALE_SECONDS = 3600  # after which half an upload of a killed server is removed


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much is taken: bytes and seconds of one upload, bytes of all of them, jobs remembered."""

    upload: int = 256 << 20
    seconds: float = 120.0
    total: int = 4 << 30
    jobs: int = 1000


class Store:
    """A folder with `uploads` and `jobs` in it."""

    def __init__(self, folder: Path, room: Room) -> None:
        self.room = room
        self.uploads, self.jobs = folder / "uploads", folder / "jobs"
        try:
            for place in (self.uploads, self.jobs):
                place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a path"
            raise TraincastError(
                f"cannot keep uploads in '{shown_path(folder)}': {reason}; give another folder"
            ) from None
        for draft in self.uploads.glob(".*.part"):
            with suppress(OSError):
                if time.time() - draft.stat().st_mtime > _STALE_SECONDS:
                    draft.unlink()

    async def receive(self, name: str, chunks: AsyncIterable[bytes]) -> dict[str, Any]:
        """Takes a file in, piece by piece; what is too large, too slow or of no known kind is refused."""
        plain = _plain_name(name)
        draft = self.uploads / f".{secrets.token_hex(8)}.part"
        try:
            try:
                async with asyncio.timeout(self.room.seconds):
                    key, size = await self._write(draft, name, chunks)
            except TimeoutError:
                raise Refusal(408, f"the file took longer than {self.room.seconds:g} s to arrive", "body") from None
            if not size:
                raise Refusal(422, "the file is empty", "body")
            known = {"id": key, "name": name, "bytes": size, "made": round(time.time())}
            place = self.uploads / key
            place.mkdir(exist_ok=True, mode=0o700)
            await asyncio.to_thread(draft.replace, place / plain)
            await asyncio.to_thread(write_json, self.uploads / f"{key}.meta", known)
        finally:
            with suppress(OSError):
                draft.unlink()
        return known

    async def _write(self, draft: Path, name: str, chunks: AsyncIterable[bytes]) -> tuple[str, int]:
        room = min(self.room.upload, self.room.total - self._used())
        digest, size = sha256(name.encode("utf-8", "replace") + b"\0"), 0
        with draft.open("xb") as file:
            draft.chmod(0o600)
            async for chunk in chunks:
                size += len(chunk)
                if size > room:
                    raise Refusal(413, f"the file is larger than the {room >> 20} MB that are left for it", "body")
                digest.update(chunk)
                await asyncio.to_thread(file.write, chunk)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        return digest.hexdigest()[:32], size

    def _used(self) -> int:
        return sum(path.stat().st_size for path in self.uploads.rglob("*") if path.is_file())

    def path(self, key: str) -> Path:
        """Where an upload lies; an id that none has is refused."""
        if _ID.fullmatch(key):
            for path in (self.uploads / key).glob("*"):
                return path
        raise Refusal(404, "no such upload; upload the file again", "workload")

    def remember(self, key: str, what: dict[str, Any]) -> dict[str, Any]:
        """Adds to what is known of an upload."""
        known = {**self.known(key), **what}
        write_json(self.uploads / f"{key}.meta", known)
        return known

    def known(self, key: str) -> dict[str, Any]:
        """What is known of an upload."""
        self.path(key)
        try:
            document: dict[str, Any] = json.loads((self.uploads / f"{key}.meta").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"id": key}
        return document

    def listed(self) -> list[dict[str, Any]]:
        """Every upload, the newest first."""
        keys = [path.stem for path in self.uploads.glob("*.meta") if _ID.fullmatch(path.stem)]
        found = []
        for key in keys:
            with suppress(Refusal):
                found.append(self.known(key))
        return sorted(found, key=lambda known: -known.get("made", 0))

    def forget(self, key: str) -> None:
        """Removes an upload."""
        path = self.path(key)
        for gone in (path, self.uploads / f"{key}.meta"):
            gone.unlink(missing_ok=True)
        path.parent.rmdir()

    def keep_job(self, key: str, question: str, form: str, status: str) -> None:
        """Writes down a job that was taken on, or what became of it; of very many the oldest are forgotten."""
        write_json(self.jobs / f"{key}.json", {"question": question, "form": form, "status": status})
        kept = sorted(self.jobs.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[: -self.room.jobs]:
            path.unlink(missing_ok=True)

    def kept_job(self, key: str) -> dict[str, str] | None:
        """A job that was taken on; None for none."""
        if _ID.fullmatch(key):
            with suppress(OSError, ValueError):
                document: dict[str, str] = json.loads((self.jobs / f"{key}.json").read_text(encoding="utf-8"))
                return document if {"question", "form", "status"} <= set(document) else None
        return None

    def kept_jobs(self) -> dict[str, dict[str, str]]:
        """Jobs that were taken on, by id."""
        kept = {path.stem: self.kept_job(path.stem) for path in self.jobs.glob("*.json")}
        return {key: job for key, job in kept.items() if job is not None}


def _plain_name(name: str) -> str:
    """A name of nothing but letters, digits and marks, with a known ending.

    >>> _plain_name("../my trace.json.gz")
    'my_trace.json.gz'
    """
    if not name or len(name) > _MOST_NAME or name != printable(name):
        raise Refusal(422, f"name: give a printable name of at most {_MOST_NAME} characters", "name")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")
    if not plain.lower().endswith(SUFFIXES):
        raise Refusal(415, f"name: a file of this kind is not taken; give one of {', '.join(SUFFIXES)}", "name")
    return plain
