"""A question answered, in any of its forms: what a worker process does. Uploads come as paths of the server's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from traincast.app import api
from traincast.app.pages.page import Page, page_html, sections_html
from traincast.app.pages.sources import is_trace
from traincast.app.pages.written import page_of, with_what_ifs
from traincast.app.report.chrome import chrome_trace
from traincast.app.report.measured_chrome import measured_chrome_trace
from traincast.app.server.fields import UPLOAD, fields
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.layouts import layout_from
from traincast.simulator.scenario.loading import Loader
from traincast.simulator.scenario.variant import VariantOptions
from traincast.traces.replay.results import TraceReport
from traincast.traces.rows import ENDS_EARLY
from traincast.utils.errors import TraincastError
from traincast.utils.results import Result

Progress = Callable[[float], None]
_KEPT = 8  # answers that a worker remembers: a page, its report and its trace are asked for one after the other
_VARIANT = ("batch_size", "seq_len", "dtype", "mode", "optimizer", "attention", "embedding", "compiled")


def answer_bytes(text: str, form: str, paths: Mapping[str, str], progress: Progress) -> bytes:
    """The answer to a question (`Asked.text`) in a form of `question.FORMS`; `paths` are where uploads lie."""
    question: dict[str, Any] = json.loads(text)
    answer, against = _remembered(text, tuple(sorted(paths.items())), progress)
    if form == "answer":
        return _json(answer.to_dict())
    if form == "trace":
        return _json(_trace(answer))
    price = question.get("price")
    page = page_of(answer, price, against)
    return page_html(with_what_ifs(page, answer, price)).encode() if form == "report" else _json(_live(page))


def check_file(path: str) -> bytes:
    """What an uploaded file is, as JSON; one that nothing can be made of is refused."""
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
    return _json({"kind": kind, "title": title.partition("\n")[0].replace(path, "the file")})


class _Unheard:
    """Progress that is no part of what is remembered."""

    def __init__(self, hear: Progress) -> None:
        self.hear = hear

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unheard)

    def __hash__(self) -> int:
        return 0


def _remembered(text: str, paths: tuple[tuple[str, str], ...], progress: Progress) -> tuple[Result, TraceReport | None]:
    return _answered(text, paths, _Unheard(progress))


@lru_cache(maxsize=_KEPT)
def _answered(
    text: str, paths: tuple[tuple[str, str], ...], progress: _Unheard
) -> tuple[Result, TraceReport | None]:  # fmt: skip
    question: dict[str, Any] = json.loads(text)
    for name in ("workload", "against"):
        if str(question.get(name, "")).startswith(UPLOAD):
            question[name] = dict(paths)[question[name].removeprefix(UPLOAD)]
    source = question["workload"]
    before = api.trace(question["against"]) if "against" in question else None
    if is_trace(source):
        return api.trace(source, on=question.get("on"), host=question.get("host")), before
    if before is not None:
        raise TraincastError("`against` compares traced runs; give an uploaded trace as `workload` too")
    if "on" not in question:
        raise TraincastError("`on` is missing: name the GPU or node to predict the step on")
    return _asked_of_workload(question, source, progress.hear), None


def _asked_of_workload(question: dict[str, Any], source: str, progress: Progress) -> Result:
    kind, on, gpus = question.get("of", "prediction"), question["on"], question.get("gpus")
    edits = question.get("edits")
    if kind == "prediction" and not edits:
        return _predicted(question, source, gpus)
    if gpus is not None and len(gpus) > 1:
        raise TraincastError(f"a {kind} is for one number of GPUs; give one number of `gpus`")
    number = gpus[0] if gpus else 1
    if kind in ("prediction", "advice"):
        price, scene = question.get("price") or None, _scene(question, gpus)
        if edits and kind == "prediction":
            return api.whatif(source, on=on, edits=edits, price=price, **scene)
        return api.advise(source, on=on, price=price, progress=progress, **scene)
    if kind == "sharding":
        size = {} if "batch_size" not in question else {"batch_size": question["batch_size"]}
        return api.shard(source, on=on, gpus=number, torchrec=False, progress=progress, **size)
    return api.plan(
        source, on=on, gpus=number, global_batch=question.get("global_batch"), seq_len=question.get("seq_len"),
        dtype=question.get("dtype", "bf16"), price=question.get("price") or None, progress=progress,
    )  # fmt: skip


def _has_layout(question: dict[str, Any]) -> bool:
    return any(question.get(name) for name, field in fields().items() if field.group == "layout")


def _scene(question: dict[str, Any], gpus: list[int] | None) -> Any:
    """The keywords that say which step is changed."""
    names = ("clock_mhz", "host", "program", "cuda_graph")
    scene = {name: question[name] for name in (*names, *_VARIANT) if name in question}
    scene["gpus"] = gpus[0] if gpus else None
    if _has_layout(question):
        scene["layout"] = layout_from(question, gpus[0] if gpus else 1)
    return scene


def _predicted(question: dict[str, Any], source: str, gpus: list[int] | None) -> Result:
    on, clock, host = question["on"], question.get("clock_mhz"), question.get("host")
    if _has_layout(question):
        if gpus is not None and len(gpus) > 1:
            raise TraincastError("a layout is for one number of GPUs; give one number of `gpus`")
        return api.predict_training(
            source, on=on, layout=layout_from(question, gpus[0] if gpus else 1), clock_mhz=clock, host=host
        )
    variant: VariantOptions = {name: question[name] for name in _VARIANT if name in question}  # type: ignore[assignment]
    program, graph = question.get("program"), question.get("cuda_graph", False)
    if "scaling" in question or (gpus and len(gpus) > 1):
        return api.scaling(
            source, on=on, gpus=gpus or [1], kind=question.get("scaling", "weak"), clock_mhz=clock, host=host,
            program=program, cuda_graph=graph, **variant,
        )  # fmt: skip
    loader = Loader(ms=question.get("loader_ms", 0.0), workers=question.get("workers", 0))
    return api.predict(
        source, on=on, gpus=gpus[0] if gpus else None, clock_mhz=clock, host=host, program=program, cuda_graph=graph,
        loader=None if loader == Loader() else loader, **variant,
    )  # fmt: skip


def _trace(answer: Result) -> dict[str, Any]:
    if isinstance(answer, Prediction):
        return chrome_trace(answer)
    if isinstance(answer, TraceReport):
        return measured_chrome_trace(answer)
    raise TraincastError("`of`: this answer has no timeline; ask for one prediction on one number of `gpus`")


def _live(page: Page) -> dict[str, Any]:
    """A page as the live one takes it in: the same sections and charts."""
    return {"title": page.title, "subtitle": page.subtitle, "html": sections_html(page), "charts": page.charts}


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
