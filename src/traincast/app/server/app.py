"""The routes: thin handlers that read a request, ask the desk, and write the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from traincast.app.server.desk import Desk
from traincast.app.server.guard import Guard
from traincast.app.server.live import ASSETS, live_asset, live_html
from traincast.app.server.openapi import api_html, document
from traincast.app.server.pool import Limits, Pool
from traincast.app.server.question import FORMS, ask, ask_document
from traincast.app.server.refusals import Refusal
from traincast.app.server.store import Room, Store
from traincast.utils.errors import TraincastError
from traincast.utils.version import __version__

_MOST_BODY = 1 << 16  # bytes of a question
_BODY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server is started with: where it keeps things, its token ("": none is needed), its limits, and where
    Perfetto's page is."""

    folder: Path
    token: str = ""
    limits: Limits = field(default_factory=Limits)
    room: Room = field(default_factory=Room)
    perfetto: str = "https://ui.perfetto.dev"


class _Routes:
    """The handlers, over one desk."""

    def __init__(self, desk: Desk, settings: Settings) -> None:
        self.desk, self.settings = desk, settings

    def listed(self) -> list[Route]:
        """Every route."""
        forms = [Route(f"/api/{form}", self._asked(form), methods=["GET"]) for form in FORMS]
        return [
            Route("/", self.live, methods=["GET"]),
            Route("/assets/{name}", self.asset, methods=["GET"]),
            Route("/api", self.documentation, methods=["GET"]),
            Route("/api/openapi.json", self.openapi, methods=["GET"]),
            Route("/api/health", self.health, methods=["GET"]),
            Route("/api/models", self.models, methods=["GET"]),
            Route("/api/platforms", self.platforms, methods=["GET"]),
            *forms,
            Route("/api/jobs", self.take_job, methods=["POST"]),
            Route("/api/jobs/{key}", self.job, methods=["GET", "DELETE"]),
            Route("/api/jobs/{key}/result", self.job_result, methods=["GET"]),
            Route("/api/uploads", self.uploads, methods=["GET", "POST"]),
            Route("/api/uploads/{key}", self.upload, methods=["GET", "DELETE"]),
        ]

    def _asked(self, form: str) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            answer = await self.desk.answer(ask(request.query_params.multi_items()), form)
            return self._pending(answer) if isinstance(answer, str) else _in_form(form, answer)

        return handle

    def _pending(self, key: str) -> Response:
        return JSONResponse(self.desk.status(key), 202, headers={"location": f"/api/jobs/{key}"})

    async def live(self, request: Request) -> Response:
        """The page with controls; its state is the query."""
        uploads = await asyncio.to_thread(self.desk.store.listed)
        return HTMLResponse(live_html(request.query_params.multi_items(), uploads, self.settings.perfetto))

    async def asset(self, request: Request) -> Response:
        """A script or style of the page."""
        name = request.path_params["name"]
        if name not in ASSETS:
            raise Refusal(404, "no such file")
        kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        return Response(live_asset(name), media_type=kind)

    async def documentation(self, _: Request) -> Response:
        """The description of the API for people."""
        return HTMLResponse(api_html())

    async def openapi(self, _: Request) -> Response:
        """The description of the API for programs."""
        return JSONResponse(document())

    async def health(self, _: Request) -> Response:
        """Whether the server answers."""
        return JSONResponse({"status": "ok", "version": __version__, **self.desk.pool.counts()})

    async def models(self, _: Request) -> Response:
        """What can be asked about."""
        return JSONResponse(await asyncio.to_thread(_models))

    async def platforms(self, _: Request) -> Response:
        """Where steps can be predicted."""
        return JSONResponse(await asyncio.to_thread(_platforms))

    async def take_job(self, request: Request) -> Response:
        """Takes a question on; its answer is fetched later."""
        question = await _body(request)
        form = question.pop("form", "answer")
        if form not in FORMS:
            raise Refusal(422, f"form: give one of {', '.join(FORMS)}", "form")
        return self._pending(self.desk.promise(ask_document(question), form))

    async def job(self, request: Request) -> Response:
        """How far a job is; or its end."""
        key = request.path_params["key"]
        return JSONResponse(self.desk.cancel(key) if request.method == "DELETE" else self.desk.status(key))

    async def job_result(self, request: Request) -> Response:
        """What a job made."""
        return _in_form(*await self.desk.result(request.path_params["key"]))

    async def uploads(self, request: Request) -> Response:
        """Every upload; or takes one in."""
        store = self.desk.store
        if request.method == "GET":
            return JSONResponse(await asyncio.to_thread(store.listed))
        if request.headers.get("content-type") != "application/octet-stream":
            raise Refusal(415, "send the file itself as application/octet-stream", "Content-Type")
        known = await store.receive(request.query_params.get("name", ""), request.stream())
        try:
            what = await self.desk.check(store.path(known["id"]))
        except Refusal:
            store.forget(known["id"])
            raise
        known = await asyncio.to_thread(store.remember, known["id"], what)
        return JSONResponse(known, 201, headers={"location": f"/api/uploads/{known['id']}"})

    async def upload(self, request: Request) -> Response:
        """What is known of an upload; or removes it."""
        key = request.path_params["key"]
        if request.method == "DELETE":
            self.desk.store.forget(key)
            return Response(status_code=204)
        return JSONResponse(self.desk.store.known(key))


def make_app(settings: Settings) -> Starlette:
    """The application; its workers start and end with it."""
    pool = Pool(settings.limits)
    desk = Desk(pool, Store(settings.folder, settings.room))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        pool.start()
        desk.resume()
        yield
        await pool.stop()

    app = Starlette(
        routes=_Routes(desk, settings).listed(),
        lifespan=lifespan,
        exception_handlers={
            Refusal: _refused, TraincastError: _refused, HTTPException: _refused, ClientDisconnect: _refused,
            Exception: _broken,
        },
    )  # fmt: skip
    app.add_middleware(Guard, token=settings.token)
    return app


def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Refusal(error.status_code, error.detail)
    if not isinstance(error, Refusal):
        error = Refusal(422, str(error) or "the request ended early", "workload" if str(error) else "body")
    headers = {"retry-after": "2"} if error.status == 429 else None
    return JSONResponse(error.to_dict(), error.status, headers=headers)


def _broken(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": {"field": "", "message": "internal error; please report it with the request"}}, 500)


def _in_form(form: str, data: bytes) -> Response:
    if form == "report":
        return Response(data, media_type="text/html; charset=utf-8",
                        headers={"content-disposition": 'attachment; filename="traincast-report.html"'})  # fmt: skip
    return Response(data, media_type="application/json")


async def _body(request: Request) -> dict[str, Any]:
    """A JSON object of at most so many bytes."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refusal(415, "send the question as application/json", "Content-Type")
    data = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > _MOST_BODY:
                    raise Refusal(413, f"the question is larger than {_MOST_BODY} bytes", "body")
    except TimeoutError:
        raise Refusal(408, "the question took too long to arrive", "body") from None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise Refusal(422, "the body is not JSON", "body") from None
    if not isinstance(content, dict):
        raise Refusal(422, "the question has to be a JSON object of fields", "body")
    return content


@cache
def _models() -> list[dict[str, Any]]:
    from traincast.app.server.fields import model_names
    from traincast.models.catalog import list_models

    known = {info.name: info for info in list_models()}
    return [
        {"model": name} | ({"description": known[name].description, "parameters": known[name].parameters,
                            "batch_size": known[name].batch_size} if name in known else {})
        for name in model_names()
    ]  # fmt: skip


@cache
def _platforms() -> list[dict[str, Any]]:
    from traincast.app.api import list_platforms

    return list_platforms().to_dict()
