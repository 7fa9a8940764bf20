"""Files that were uploaded: bounded in size and time, kept in a folder that ends with the server.

The id of a file is the hash of its content and name, so that uploading it again changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from traincast.app.server.guard import Rejection
from traincast.utils.errors import escape_text

SUFFIXES = (".json.gz", ".json", ".tc", ".yaml", ".yml", ".et.gz", ".et")
"""Endings of files that are taken: traces, configurations, workloads, descriptions."""
_MOST_NAME = 120


@dataclass(frozen=True, kw_only=True)
class UploadLimits:
    """Bytes and seconds of one upload, bytes of all of them together."""

    most_bytes: int = 256 << 20
    seconds: float = 120.0
    total_bytes: int = 4 << 30


class Uploads:
    """The uploads of a server in a folder of their own."""

    def __init__(self, folder: Path, limits: UploadLimits) -> None:
        self.folder, self.limits = folder, limits
        self._known: dict[str, dict[str, Any]] = {}
        self._paths: dict[str, Path] = {}

    async def receive(self, name: str, chunks: AsyncIterable[bytes]) -> str:
        """Takes a file in, piece by piece, and gives its id; what is too large, too slow or of no known kind is
        rejected."""
        plain = _clean_name(name)
        draft = self.folder / secrets.token_hex(8)
        try:
            async with asyncio.timeout(self.limits.seconds):
                key, size = await self._write(draft, name, chunks)
            if not size:
                raise Rejection(422, "the file is empty", "body")
            if self.has(key):
                return key
            place = self.folder / key
            place.mkdir(exist_ok=True, mode=0o700)
            draft.replace(place / plain)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise Rejection(408, f"the file took longer than {self.limits.seconds:g} s to arrive", "body") from None
            raise Rejection(507, f"the file could not be kept: {error.strerror}; try a smaller one", "body") from None
        finally:
            draft.unlink(missing_ok=True)
        self._paths[key] = place / plain
        self._known[key] = {"id": key, "name": name, "bytes": size, "made": round(time.time())}
        return key

    async def _write(self, draft: Path, name: str, chunks: AsyncIterable[bytes]) -> tuple[str, int]:
        room = min(self.limits.most_bytes, self.limits.total_bytes - sum(one["bytes"] for one in self._known.values()))
        digest, size = sha256(name.encode("utf-8", "replace") + b"\0"), 0
        with draft.open("xb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > room:
                    raise Rejection(413, f"the file is larger than the {room >> 20} MB that are left for it", "body")
                digest.update(chunk)
                await asyncio.to_thread(file.write, chunk)
        return digest.hexdigest()[:32], size

    def path(self, key: str) -> Path:
        """Where an upload resides; an id that none has is rejected."""
        if key not in self._paths:
            raise Rejection(404, "no such upload; upload the file again", "workload")
        return self._paths[key]

    def has(self, key: str) -> bool:
        """Whether there is such an upload."""
        return key in self._paths

    def describe(self, key: str, **more: Any) -> dict[str, Any]:
        """What is known of an upload, and from now on `more`."""
        self.path(key)
        self._known[key] |= more
        return self._known[key]

    def list(self) -> list[dict[str, Any]]:
        """Every upload, the newest first."""
        return list(reversed(self._known.values()))

    def forget(self, key: str) -> None:
        """Removes an upload."""
        path = self.path(key)
        path.unlink(missing_ok=True)
        path.parent.rmdir()
        del self._paths[key], self._known[key]


def _clean_name(name: str) -> str:
    """A name of nothing but letters, digits and marks, with a known ending.

    >>> _clean_name("../my trace.json.gz")
    'my_trace.json.gz'
    """
    if not name or len(name) > _MOST_NAME or name != escape_text(name):
        raise Rejection(422, f"name: give a printable name of at most {_MOST_NAME} characters", "name")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")
    if not plain.lower().endswith(SUFFIXES):
        raise Rejection(415, f"name: a file of this kind is not taken; give one of {', '.join(SUFFIXES)}", "name")
    return plain
