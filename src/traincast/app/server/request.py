"""A question as it was asked: checked field by field, and the same text for the same question."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from traincast.app.server.fields import UPLOAD, list_fields, list_model_names
from traincast.app.server.guard import Rejection
from traincast.models.embeddings.documents import BUILTIN_SETS
from traincast.utils.errors import find_nearest, shorten_value

FORMS = ("answer", "page", "report", "trace")
"""What a result can be had as: plain data, a page's sections, a self-contained HTML file, a Chrome trace."""
_UPLOAD = re.compile(r"upload:[0-9a-f]{32}")
_LONG = ("fits", "compare", "plan", "sharding", "advice", "sweep")  # kinds that search or predict several steps


@dataclass(frozen=True)
class ParsedRequest:
    """A question whose every field is within its limits. `key` names it."""

    values: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The same for the same question."""
        return sha256(self.text.encode()).hexdigest()[:32]

    @property
    def text(self) -> str:
        """The question as JSON, its fields sorted."""
        return json.dumps(self.values, sort_keys=True, separators=(",", ":"))

    @property
    def uploads(self) -> list[str]:
        """Ids of the uploads that it names."""
        named = [self.values.get(name, "") for name in ("workload", "against")]
        return [value.removeprefix(UPLOAD) for value in named if value.startswith(UPLOAD)]

    @property
    def is_long(self) -> bool:
        """Whether it searches, draws a curve, or reads a stranger's file: work of seconds."""
        many = len(self.values.get("gpus", ())) > 1
        return self.values.get("of") in _LONG or many or bool(self.uploads)


def parse_request(pairs: Iterable[tuple[str, str]]) -> ParsedRequest:
    """The question of a query; empty values are absent, what is unknown, given twice or out of range is rejected."""
    values: dict[str, Any] = {}
    known = list_fields()
    for name, text in pairs:
        if name not in known:
            raise Rejection(422, f"{shorten_value(name)} is no field; give some of {', '.join(known)}", name[:64])
        if name in values:
            raise known[name].refusal("given twice; give it once")
        if text.strip():
            values[name] = known[name].parsed(text.strip())
    if values.get("workload") in BUILTIN_SETS and "plan" not in values:
        values.setdefault("of", "sharding")  # what else tables alone can be asked for
    _check_sources(values)
    _check_companions(values)
    return ParsedRequest(values)


def _check_companions(values: Mapping[str, Any]) -> None:
    """Fields that belong to one kind of question stand with it only, and it has them."""
    for name, kind in (("also", "compare"), ("vary", "sweep")):
        asked = values.get("of") == kind
        if (name in values) != asked:
            raise list_fields()[name].refusal(
                f"missing; a {kind} needs it" if asked else f"is for a {kind}; leave it out"
            )


def parse_document(document: Any) -> ParsedRequest:
    """The question of a JSON object; values may be text or numbers, and `gpus` a list."""
    if not isinstance(document, dict):
        raise Rejection(422, "the question has to be a JSON object of fields", "body")
    return parse_request(
        [(str(name), _write_as_text(str(name), value)) for name, value in document.items() if value is not None]
    )


def _write_as_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list) and all(isinstance(item, int | str) for item in value):
        return ",".join(str(item) for item in value)
    if isinstance(value, str | int | float):
        return str(value)
    raise Rejection(422, f"{name[:64]}: give text or a number", name[:64])


def _check_sources(values: Mapping[str, Any]) -> None:
    """Only built-in names and uploads are sources: no path of the server's is."""
    known = list_fields()
    if "workload" not in values:
        raise known["workload"].refusal("missing; name a built-in model, or upload a file")
    for name in ("workload", "against"):
        value = values.get(name)
        if value is None or _UPLOAD.fullmatch(value):
            continue
        if name == "against":
            raise known[name].refusal(f"{shorten_value(value)}: give an uploaded trace ({UPLOAD} and its id)")
        names = BUILTIN_SETS if values.get("of") == "sharding" else list_model_names()
        if value not in names:
            near = find_nearest(value, names)
            hint = f"did you mean {', '.join(near)}?" if near else "the models endpoint lists them"
            raise known[name].refusal(f"{shorten_value(value)} is nothing built in and no upload; {hint}")
    if "on" not in values and not _UPLOAD.fullmatch(values["workload"]):
        raise known["on"].refusal("missing; name the GPU or node to predict the step on")
