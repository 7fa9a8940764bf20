"""What stands before every route: who may ask, from where, and what the answers carry.

A browser tells where a request comes from (`Origin`, `Sec-Fetch-Site`); what another site's page sends is refused, but
for a link to the page itself. On loopback the `Host` has to be loopback too, so that no name that somebody else's DNS
points here is answered. Bound elsewhere, every request needs the token.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from traincast.app.server.refusals import Refusal

COOKIE = "traincast_token"
_NAVIGATION = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
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
    """Wraps the application; `token` is "" where none is needed."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses, or passes on and adds headers to what comes back."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("content-security-policy", _POLICY)
            await send(message)

        try:
            answer = self._checked(scope, Headers(scope=scope))
        except Refusal as refusal:
            answer = JSONResponse(refusal.to_dict(), refusal.status)
        await (answer or self.app)(scope, receive, sent)

    def _checked(self, scope: Scope, headers: Headers) -> Response | None:
        """A response that takes the place of the application's, or None."""
        host = _host(headers.get("host", ""))
        if not self.token and not is_loopback(host):
            raise Refusal(421, "this server answers to names of this machine only", "Host")
        _check_site(scope, headers)
        return self._admitted(scope, headers) if self.token else None

    def _admitted(self, scope: Scope, headers: Headers) -> Response | None:
        """With the token in the address: a cookie instead, and the address without it."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(given.strip()):
            return None
        if self._is_token(_cookies(headers).get(COOKIE, "")):
            return None
        query = parse_qsl(scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
        if scope["path"] == "/" and scope["method"] == "GET" and self._is_token(dict(query).get("token", "")):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            answer = RedirectResponse(f"/?{rest}" if rest else "/", 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict", path="/")
            return answer
        raise Refusal(401, "this server needs its token: open the address it printed, or send 'Authorization: Bearer'",
                      "Authorization")  # fmt: skip

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _check_site(scope: Scope, headers: Headers) -> None:
    """Refuses what pages of other sites send."""
    refusal = Refusal(403, "requests of other sites are not answered", "Origin")
    origin = headers.get("origin")
    if origin is not None and _place(origin) != headers.get("host", ""):
        raise refusal
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return
    followed = all(headers.get(name) == value for name, value in _NAVIGATION.items())
    if not (followed and scope["method"] == "GET" and scope["path"] == "/"):
        raise refusal


def _place(origin: str) -> str | None:
    """Host and port of an origin; None for what is none, such as "null"."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc if parts.scheme in ("http", "https") else None


def _host(value: str) -> str:
    """The name in a `Host` header, without its port."""
    try:
        return urlsplit(f"//{value}").hostname or ""
    except ValueError:
        return ""


def _cookies(headers: Headers) -> Mapping[str, str]:
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in cookies.items()}
