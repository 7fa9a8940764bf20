"""The routes: thin handlers that read a request, give it to a job, and write the result."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from traincast.app.server.fields import list_fields, list_model_names
from traincast.app.server.guard import Guard, Rejection
from traincast.app.server.jobs import Jobs, Limits
from traincast.app.server.live import ASSETS, read_live_asset, render_live_page
from traincast.app.server.request import FORMS, ParsedRequest, parse_document, parse_request
from traincast.app.server.uploads import UploadLimits, Uploads
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
