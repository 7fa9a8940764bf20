"""The server: routes (thin handlers that give a request to a job), the socket, the address that it prints, its end by a
signal."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from traincast.app.server.fields import (
    FORMS,
    ParsedRequest,
    list_fields,
    list_model_names,
    parse_document,
    parse_request,
)
from traincast.app.server.guard import Guard, Rejection, UploadLimits, Uploads, is_loopback
from traincast.app.server.jobs import Jobs, Limits
from traincast.app.server.live import ASSETS, read_live_asset, render_live_page
from traincast.utils.errors import TraincastError
from traincast.utils.version import __version__

PATIENCE = 5.0
"""Seconds that a request waits for its result before it is given a job to ask for."""
_FORM_SAYS = {
    "/api/answer": "The result as plain data, the JSON document that the command line prints.",
    "/api/page": "Title, sections as HTML and the data of charts, as the live page shows them.",
    "/api/report": "The result as one self-contained HTML file.",
    "/api/trace": "The timeline as a Chrome trace, which Perfetto opens.",
}
_MOST_BODY = 1 << 16  # bytes of a question
_BODY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server is started with: limits of its jobs and uploads, and where Perfetto's page is."""

    limits: Limits = field(default_factory=Limits)
    uploads: UploadLimits = field(default_factory=UploadLimits)
    perfetto: str = "https://ui.perfetto.dev"


class _Routes:
    """The handlers, over the jobs and uploads of one server."""

    def __init__(self, jobs: Jobs, uploads: Uploads, perfetto: str) -> None:
        self.jobs, self.uploads, self.perfetto = jobs, uploads, perfetto
        self._checking: Counter[str] = Counter()

    def listed(self) -> list[Route]:
        """Every route."""
        forms = [Route(f"/api/{form}", self._asked(form), methods=["GET"]) for form in FORMS]
        return [
            Route("/", self.live, methods=["GET"]),
            Route("/assets/{name}", self.asset, methods=["GET"]),
            Route("/api", self.documentation, methods=["GET"]),
            Route("/api/health", self.health, methods=["GET"]),
            Route("/api/models", self.models, methods=["GET"]),
            Route("/api/platforms", self.platforms, methods=["GET"]),
            *forms,
            Route("/api/jobs", self.take_job, methods=["POST"]),
            Route("/api/jobs/{key}", self.job, methods=["GET", "DELETE"]),
            Route("/api/jobs/{key}/result", self.job_result, methods=["GET"]),
            Route("/api/uploads", self.all_uploads, methods=["GET", "POST"]),
            Route("/api/uploads/{key}", self.upload, methods=["GET", "DELETE"]),
        ]

    def _asked(self, form: str) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            key = self._ask(parse_request(request.query_params.multi_items()), form)
            job = self.jobs.find(key)
            await asyncio.wait([job.done], timeout=PATIENCE)
            return _answer_in_form(form, job.answer()) if job.done.done() else self._pending(key)

        return handle

    def _ask(self, asked: ParsedRequest, form: str) -> str:
        return self.jobs.ask(asked, form, {key: str(self.uploads.path(key)) for key in asked.uploads})

    def _pending(self, key: str) -> Response:
        described = {"id": key, **self.jobs.find(key).describe()}
        return JSONResponse(described, 202, headers={"location": f"/api/jobs/{key}"})

    async def live(self, request: Request) -> Response:
        """The page with controls; its state is the query."""
        return HTMLResponse(render_live_page(request.query_params.multi_items(), self.uploads.list(), self.perfetto))

    async def asset(self, request: Request) -> Response:
        """A script or style of the page."""
        name = request.path_params["name"]
        if name not in ASSETS:
            raise Rejection(404, "no such file")
        kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        return Response(read_live_asset(name), media_type=kind)

    async def documentation(self, request: Request) -> Response:
        """The API described: its routes, the forms of results, and the fields of a question."""
        routes = {
            f"{method} {route.path}": (route.endpoint.__doc__ or _FORM_SAYS.get(route.path, "")).strip()
            for route in request.app.routes
            for method in sorted(route.methods - {"HEAD"})
            if route.path.startswith("/api/")
        }
        fields = {field.name: field.describe() for field in list_fields().values()}
        long = "what takes more than a few seconds answers 202 with a job: ask for it, then for its result"
        return JSONResponse({"version": __version__, "routes": routes, "fields": fields, "jobs": long})

    async def health(self, _: Request) -> Response:
        """Whether the server answers."""
        return JSONResponse({"status": "ok", "version": __version__, **self.jobs.count()})

    async def models(self, _: Request) -> Response:
        """What can be asked about."""
        return JSONResponse(await asyncio.to_thread(_list_models))

    async def platforms(self, _: Request) -> Response:
        """Where steps can be predicted."""
        return JSONResponse(await asyncio.to_thread(_list_platforms))

    async def take_job(self, request: Request) -> Response:
        """Takes a question on; its result is fetched later."""
        question = await _body(request)
        form = question.pop("form", "answer")
        if form not in FORMS:
            raise Rejection(422, f"form: give one of {', '.join(FORMS)}", "form")
        return self._pending(self._ask(parse_document(question), form))

    async def job(self, request: Request) -> Response:
        """How far a job is; or its end."""
        key = request.path_params["key"]
        job = self.jobs.cancel(key) if request.method == "DELETE" else self.jobs.find(key)
        return JSONResponse({"id": key, **job.describe()})

    async def job_result(self, request: Request) -> Response:
        """What a job made."""
        job = self.jobs.find(request.path_params["key"])
        return _answer_in_form(job.form, job.answer())

    async def all_uploads(self, request: Request) -> Response:
        """Every upload; or takes one in."""
        if request.method == "GET":
            return JSONResponse(self.uploads.list())
        if request.headers.get("content-type") != "application/octet-stream":
            raise Rejection(415, "send the file itself as application/octet-stream", "Content-Type")
        key = await self.uploads.receive(request.query_params.get("name", ""), request.stream())
        if "kind" not in self.uploads.describe(key):
            await self._check_upload(key)
        return JSONResponse(self.uploads.describe(key), 201, headers={"location": f"/api/uploads/{key}"})

    async def _check_upload(self, key: str) -> None:
        """Notes what an upload is; one that nobody could check is removed, unless another request has it accepted."""
        self._checking[key] += 1
        try:
            what = await self.jobs.check(self.uploads.path(key))
            self.uploads.describe(key, **what)
        finally:
            self._checking[key] -= 1
            if not self._checking[key]:
                del self._checking[key]
                if self.uploads.has(key) and "kind" not in self.uploads.describe(key):
                    self.uploads.forget(key)

    async def upload(self, request: Request) -> Response:
        """What is known of an upload; or removes it."""
        key = request.path_params["key"]
        if request.method == "DELETE":
            self.uploads.forget(key)
            return Response(status_code=204)
        return JSONResponse(self.uploads.describe(key))


def make_app(settings: Settings) -> Starlette:
    """The application; its workers and its uploads begin and end with it."""
    jobs, folder = Jobs(settings.limits), TemporaryDirectory(prefix="traincast-", ignore_cleanup_errors=True)
    uploads = Uploads(Path(folder.name), settings.uploads)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with folder:
            jobs.start()
            yield
            await jobs.stop()

    app = Starlette(
        routes=_Routes(jobs, uploads, settings.perfetto).listed(),
        lifespan=lifespan,
        exception_handlers={
            Rejection: _serve_rejection,
            TraincastError: _serve_rejection,
            HTTPException: _serve_rejection,
            ClientDisconnect: _serve_rejection,
            Exception: _serve_own_error,
        },
    )
    app.add_middleware(Guard)
    return app


def _serve_rejection(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Rejection(error.status_code, error.detail)
    if not isinstance(error, Rejection):
        error = Rejection(422, str(error) or "the request ended early", "workload" if str(error) else "body")
    headers = {"retry-after": "2"} if error.status == 429 else None
    return JSONResponse(error.to_dict(), error.status, headers=headers)


def _serve_own_error(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": {"field": "", "message": "internal error; please report it with the request"}}, 500)


def _answer_in_form(form: str, data: bytes) -> Response:
    if form == "report":
        return Response(data, media_type="text/html; charset=utf-8",
                        headers={"content-disposition": 'attachment; filename="traincast-report.html"'})  # fmt: skip
    return Response(data, media_type="application/json")


async def _body(request: Request) -> dict[str, Any]:
    """A JSON object of at most this many bytes."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Rejection(415, "send the question as application/json", "Content-Type")
    data = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > _MOST_BODY:
                    raise Rejection(413, f"the question is larger than {_MOST_BODY} bytes", "body")
    except TimeoutError:
        raise Rejection(408, "the question took too long to arrive", "body") from None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise Rejection(422, "the body is not JSON", "body") from None
    if not isinstance(content, dict):
        raise Rejection(422, "the question has to be a JSON object of fields", "body")
    return content


@cache
def _list_models() -> list[dict[str, Any]]:
    from traincast.models.catalog import list_models

    known = {info.name: info for info in list_models()}
    return [
        {"model": name} | ({"description": known[name].description, "parameters": known[name].parameters,
                            "batch_size": known[name].batch_size} if name in known else {})
        for name in list_model_names()
    ]  # fmt: skip


@cache
def _list_platforms() -> list[dict[str, Any]]:
    from traincast.app.api import list_platforms

    return list_platforms().to_dict()


_BACKLOG = 32  # connections that wait, and that are taken at once before any is looked at
_HEADER_SECONDS = 10.0  # a request's first line and headers may take
_MOST_CONNECTIONS = 512
_MOST_HEADER = 1 << 15  # bytes of a request's first line and headers


class _Server(uvicorn.Server):
    """uvicorn's server, which ends in peace when it is told to: it does not raise the signal again."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Ctrl-C and SIGTERM let requests that run come to their end, then the server ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Protocol(H11Protocol):
    """uvicorn's protocol, which drops connections that send no whole header: soon, or once files are short."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection. Each one is an open file: of too many, the one that has kept its header longest goes."""
        super().connection_made(transport)
        self._watch_header()
        held = [one for one in self.connections if isinstance(one, _Protocol) and not one.transport.is_closing()]
        if len(held) > min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3):
            owed = {one: one._deadline.when() for one in held if one._deadline is not None}
            min(owed, key=owed.__getitem__).transport.abort()  # this one where no other keeps its header

    def data_received(self, data: bytes) -> None:
        """Takes bytes in; a header that is not whole has to be so soon."""
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the deadline of a connection that ended."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _watch_header(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; what the system rejects is said in a line."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)  # from here on connections wait for the application to start
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraincastError(f"cannot listen on `host` {host}, `port` {port}: {reason}; give another") from None
    return listening


def serve(settings: Settings, *, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serves on this machine until a signal comes; `started` is called with the address of the page."""
    if not is_loopback(host):
        raise TraincastError(
            f"`host` {host} is not this machine: the server answers on loopback only; give 127.0.0.1 and forward the "
            "port (ssh -L) to reach it from elsewhere"
        )
    with bind(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        config = uvicorn.Config(
            make_app(settings), http=_Protocol, backlog=_BACKLOG, ws="none", loop="asyncio", log_config=None,
            access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=30,
            timeout_graceful_shutdown=3, h11_max_incomplete_event_size=_MOST_HEADER, lifespan="on",
        )  # fmt: skip
        started(f"http://{shown}:{listening.getsockname()[1]}/")
        _Server(config).run(sockets=[listening])
