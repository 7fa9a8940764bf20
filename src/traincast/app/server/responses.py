"""A question answered, in any of its forms: what a worker process does. Uploads come as paths of the server's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from traincast.app import api
from traincast.app.pages.page import Page, render_page, render_sections
from traincast.app.pages.parts import is_trace
from traincast.app.pages.writing import add_what_ifs, make_page
from traincast.app.report.chrome import make_chrome_trace
from traincast.app.report.measured_chrome import make_measured_chrome_trace
from traincast.app.server.fields import UPLOAD
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.scenario import list_scenario_fields
from traincast.traces.events import ENDS_EARLY
from traincast.traces.replay.results import TraceReport
from traincast.utils.errors import TraincastError
from traincast.utils.results import Result

Progress = Callable[[float], None]
_KEPT = 8  # answers that a worker remembers: a page, its report and its trace are asked for one after the other


def make_result_bytes(text: str, form: str, paths: Mapping[str, str], progress: Progress) -> bytes:
    """The answer to a question (`Asked.text`) in a form of `request.FORMS`; `paths` are where uploads are."""
    request: dict[str, Any] = json.loads(text)
    result, against = _remember_result(text, tuple(sorted(paths.items())), progress)
    if form == "answer":
        return _encode_json(result.to_dict())
    if form == "trace":
        return _encode_json(_compute_trace(result))
    price = request.get("price")
    page = make_page(result, price, against)
    return (
        render_page(add_what_ifs(page, result, price)).encode()
        if form == "report"
        else _encode_json(_render_live(page))
    )


def check_file(path: str) -> bytes:
    """What an uploaded file is, as JSON; one that nothing can be made of is rejected."""
    if is_trace(path):
        report = api.trace(path)
        odd = [note for rank in report.ranks for note in rank.linked.trace.notes if note.startswith(ENDS_EARLY)]
        if odd:
            raise TraincastError(f"the trace is damaged: {odd[0]}; upload it whole")
        kind, title = "trace", report.headline()
    elif path.endswith(".json"):
        from traincast.models.transformers.reading import load_transformer

        kind, title = "description", f"Transformer of {load_transformer(path).layers} layers"
    else:
        kind, title = "workload", api.load(path).headline()
    return _encode_json({"kind": kind, "title": title.partition("\n")[0].replace(path, "the file")})


class _SilentRequest:
    """Progress that is no part of what is remembered."""

    def __init__(self, hear: Progress) -> None:
        self.hear = hear

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SilentRequest)

    def __hash__(self) -> int:
        return 0


def _remember_result(
    text: str, paths: tuple[tuple[str, str], ...], progress: Progress
) -> tuple[Result, TraceReport | None]:
    return _compute_result(text, paths, _SilentRequest(progress))


@lru_cache(maxsize=_KEPT)
def _compute_result(
    text: str, paths: tuple[tuple[str, str], ...], progress: _SilentRequest
) -> tuple[Result, TraceReport | None]:  # fmt: skip
    request: dict[str, Any] = json.loads(text)
    for name in ("workload", "against"):
        if str(request.get(name, "")).startswith(UPLOAD):
            request[name] = dict(paths)[request[name].removeprefix(UPLOAD)]
    source = request["workload"]
    before = api.trace(request["against"]) if "against" in request else None
    if is_trace(source):
        return api.trace(source, on=request.get("on"), host=request.get("host")), before
    if before is not None:
        raise TraincastError("`against` compares traced runs; give an uploaded trace as `workload` too")
    if "on" not in request:
        raise TraincastError("`on` is missing: name the GPU or node to predict the step on")
    return _compute_of_workload(request, source, progress.hear), None


def _compute_of_workload(request: dict[str, Any], source: str, progress: Progress) -> Result:
    kind, gpus = request.get("of", "prediction"), request.get("gpus")
    values = {name: value for name, value in request.items() if name in list_scenario_fields() and name != "gpus"}
    values |= {"workload": source} | ({"gpus": gpus[0]} if gpus else {})
    edits, price = request.get("edits"), request.get("price") or None
    curve = "scaling" in request or bool(gpus and len(gpus) > 1)
    if kind == "prediction" and not edits:
        if curve:
            return api.scaling(kind=request.get("scaling", "weak"), **{**values, "gpus": gpus or [1]})
        return api.predict(**values)
    if curve:
        raise TraincastError(f"a {kind} is for one number of GPUs; give one number of `gpus`, and no `scaling`")
    if kind == "prediction":
        return api.whatif(edits=edits or [], price=price, **values)
    if kind == "fits":
        return api.fits(progress=progress, **values)
    if kind == "compare":
        platforms = list(dict.fromkeys([values.pop("on"), *request["also"]]))
        return api.compare(values.pop("workload"), on=platforms, price=price, progress=progress, **values)
    if kind == "sweep":
        return api.sweep(vary=request["vary"], price=price, processes=1, progress=progress, **values)
    if kind == "advice":
        return api.advise(price=price, progress=progress, **values)
    values.setdefault("gpus", 1)
    if kind == "sharding":
        return api.shard(values.pop("workload"), torchrec=False, progress=progress, **values)
    return api.plan(price=price, progress=progress, **values)


def _compute_trace(result: Result) -> dict[str, Any]:
    if isinstance(result, Prediction):
        return make_chrome_trace(result)
    if isinstance(result, TraceReport):
        return make_measured_chrome_trace(result)
    raise TraincastError("`of`: this result has no timeline; ask for one prediction on one number of `gpus`")


def _render_live(page: Page) -> dict[str, Any]:
    """A page as the live one takes it in: the same sections and charts."""
    return {"title": page.title, "subtitle": page.subtitle, "html": render_sections(page), "charts": page.charts}


def _encode_json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
