"""What stands before every route (from where a request may come, headers of answers), and uploaded files, bounded in
size and time.

A browser tells where a request comes from (`Origin`, `Sec-Fetch-Site`); what another site's page sends is rejected, but
for a link to the page itself. The `Host` has to be loopback, so that no name that somebody else's DNS points here is
answered.

The id of a file is the hash of its content and name, so that uploading it again changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from traincast.utils.errors import escape_text


class Rejection(Exception):
    """A request that is not answered. `status` is one of 4xx; `field` names what is wrong ("" where it is no field)."""

    def __init__(self, status: int, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field

    def to_dict(self) -> dict[str, Any]:
        """The body of the result."""
        return {"error": {"field": self.field, "message": self.message}}


def find_field(message: str, request: dict[str, Any], names: Iterable[str]) -> str:
    """The field that a message is about: one that it names, else one whose value it repeats, else the workload.

    >>> field_of("`batch_size` 0 is out of range", {"batch_size": 0}, ["gpus", "batch_size"])
    'batch_size'
    """
    notes = f" {' '.join(re.findall('[a-z0-9]+', message.lower()))} "
    names = list(names)
    for name in names:
        if f"`{name}" in message:
            return name
    for name in names:
        if name in request and f" {name.replace('_', ' ')} " in notes:
            return name
    for name, value in request.items():
        if isinstance(value, str) and value and value in message:
            return name
    return "workload"


_NAVIGATION = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether a host names this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rejects, or passes on and adds headers to what comes back."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app = self.app
        try:
            _check_host(Headers(scope=scope))
            _check_site(scope, Headers(scope=scope))
        except Rejection as rejection:
            app = JSONResponse(rejection.to_dict(), rejection.status)
        await app(scope, receive, sent)


def _check_host(headers: Headers) -> None:
    """Rejects names that are not of this machine."""
    try:
        name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        raise Rejection(421, "this server answers to names of this machine only", "Host")


def _check_site(scope: Scope, headers: Headers) -> None:
    """Rejects what pages of other sites send."""
    rejection = Rejection(403, "requests of other sites are not answered", "Origin")
    origin = headers.get("origin")
    if origin is not None and _parse_origin(origin) != headers.get("host", ""):
        raise rejection
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return
    followed = all(headers.get(name) == value for name, value in _NAVIGATION.items())
    if not (followed and scope["method"] == "GET" and scope["path"] == "/"):
        raise rejection


def _parse_origin(origin: str) -> str | None:
    """Host and port of an origin; None for what is none, such as "null"."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc if parts.scheme in ("http", "https") else None


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
