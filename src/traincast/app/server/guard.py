"""What stands before every route: from where a request may come, which headers answers carry, how rejections are told.

A browser tells where a request comes from (`Origin`, `Sec-Fetch-Site`); what another site's page sends is rejected, but
for a link to the page itself. The `Host` has to be loopback, so that no name that somebody else's DNS points here is
answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
