"""What can be asked: fields of a scenario and of the question around it, checked one by one; rejections that say what
to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from traincast.app.server.guard import Rejection
from traincast.costs.host.profile import list_cpus, list_host_profiles
from traincast.hardware.platform import list_platform_keys
from traincast.models.catalog import list_models, list_published_programs
from traincast.models.embeddings.documents import BUILTIN_SETS
from traincast.models.transformers.reading import list_built_in_names
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.planner.what_if.sweeps.points import make_grid
from traincast.simulator.scenario.scaling import SCALINGS
from traincast.simulator.scenario.scenario import GROUPS, FieldInfo, list_scenario_fields
from traincast.utils.errors import TraincastError, find_nearest, shorten_value

KINDS = ("prediction", "fits", "compare", "plan", "sharding", "advice", "sweep")
UPLOAD = "upload:"
"""How a field names a file that was uploaded: this and its id."""
MOST_CHARACTERS = 200  # of a value; the longest honest one is a list of GPUs
_MOST_POINTS = 16  # of a scaling curve
_MOST_SWEPT = 64  # points of a sweep
_HOSTS = (*list_host_profiles(), *list_cpus())
_MAIN = ("gpus", "batch_size", "dtype")
DETAILS = {name: title for name, title in GROUPS.items() if name not in ("source", "tables")}
"""Groups of fields that the form folds away, and their titles."""


_PRICE = FieldInfo(name="price", option="", kind="number", group="main", help="", described="", unit="",
                   default="", choices=(), least=0, most=1e6 - 1, needs=(), is_file=False)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field: `kind` is "choice", "integer", "integers" (several with commas between), "number", "flag", "text",
    "edits", "platforms" (several with commas between), "axes" (of a sweep), or "source" (a name or an upload); `group`
    is where the form has it, `info` its declaration in the scenario (None: it belongs to the question)."""

    name: str
    label: str
    kind: str
    group: str
    help: str = ""
    choices: tuple[str, ...] = ()
    info: FieldInfo | None = None

    def parsed(self, text: str) -> Any:
        """The value that a text stands for; what it cannot stand for is rejected by the field's name."""
        if len(text) > MOST_CHARACTERS or not text.isprintable():
            raise self.refusal(f"{shorten_value(text)}: give at most {MOST_CHARACTERS} printable characters")
        if self.kind == "integers":
            return [self._declared(part.strip()) for part in self._parts(text)]
        if self.kind == "edits":
            return [self._edit(part.strip()) for part in self._parts(text)]
        if self.kind == "platforms":
            names = [part.strip() for part in self._parts(text)]
            for name in names:
                self._check_choice(name)
            return names
        if self.kind == "axes":
            return self._axes(text)
        if self.choices:
            self._check_choice(text)
        return text if self.info is None and self.kind != "number" else self._declared(text)

    def refusal(self, message: str) -> Rejection:
        """A rejection that names this field."""
        return Rejection(422, f"{self.name}: {message}", self.name)

    def _declared(self, text: str) -> Any:
        """The value of a field of the scenario, or of the price."""
        info = self.info or _PRICE
        try:
            return info.parse(text)
        except TraincastError as error:
            raise self.refusal(str(error).replace(f"`{info.name}` ", "")) from None

    def _check_choice(self, text: str) -> None:
        if text in self.choices:
            return
        near = find_nearest(text, self.choices)
        hint = f"did you mean {', '.join(near)}?" if near else f"give one of {', '.join(self.choices[:12])}"
        raise self.refusal(f"{shorten_value(text)} is unknown; {hint}")

    def _axes(self, text: str) -> dict[str, list[str]]:
        """What a sweep varies, `batch-size=32:256:x2 on=v100,h100`, of at most so many points."""
        axes: dict[str, list[str]] = {}
        for part in text.split():
            name, equals, values = part.partition("=")
            if not equals or name in axes:
                raise self.refusal(f"{shorten_value(part)}: give axes as batch-size=32,64 on=v100,h100")
            axes[name] = values.split(",")
        try:
            grid = make_grid(axes)
        except TraincastError as error:
            raise self.refusal(str(error)) from None
        if grid.points > _MOST_SWEPT:
            raise self.refusal(f"{grid.points:,} points; give at most {_MOST_SWEPT}, or use 'traincast sweep'")
        for name, swept in grid.axes:
            for value in swept:
                self._edit(value if name == "apply" else f"{name}={value}")
        return axes

    def _parts(self, text: str) -> list[str]:
        parts = text.split(",")
        if len(parts) > _MOST_POINTS:
            raise self.refusal(f"{len(parts)} values; give at most {_MOST_POINTS}")
        return parts

    def _edit(self, text: str) -> str:
        """An edit that names nothing on this machine: platforms and hosts are built in, plans are searched for."""
        try:
            parse_edits([text])
        except TraincastError as error:
            raise self.refusal(str(error)) from None
        name, _, value = text.partition("=")
        files = {info.option.removeprefix("--"): () for info in list_scenario_fields().values() if info.is_file}
        allowed = (files | {"on": list_platform_keys(), "host": _HOSTS, "plan": ("search",)}).get(name)
        if allowed is not None and value not in allowed:
            raise self.refusal(f"{shorten_value(text)}: give one of {', '.join(allowed[:12]) or 'the other edits'}")
        return text

    def describe(self) -> dict[str, Any]:
        """What the field is, for people who write requests by hand."""
        about = {"kind": self.kind, "label": self.label, "help": self.help}
        return about | ({"choices": list(self.choices)} if self.choices else {})


@cache
def list_model_names() -> tuple[str, ...]:
    """Every built-in model, published program and described Transformer."""
    return tuple(
        dict.fromkeys([*(info.name for info in list_models()), *list_published_programs(), *list_built_in_names()])
    )  # fmt: skip


@cache
def list_fields() -> dict[str, Field]:
    """All fields by name, in the order of the form."""
    return {field.name: field for field in (*_list_request_fields(), *_list_scenario_fields())}


def _list_request_fields() -> Iterable[Field]:
    yield Field(name="of", label="Question", kind="choice", group="main", choices=KINDS,
                help="what is to be answered")  # fmt: skip
    yield Field(name="workload", label="Model", kind="source", group="main",
                help="a built-in model, or an uploaded workload, description or trace")  # fmt: skip
    yield Field(name="on", label="Platform", kind="choice", group="main", choices=tuple(list_platform_keys()))
    yield Field(name="also", label="And on", kind="platforms", group="main", choices=tuple(list_platform_keys()),
                help="other platforms to compare with, commas between")  # fmt: skip
    yield Field(name="vary", label="Vary", kind="axes", group="main",
                help="axes of a sweep: batch-size=32:256:x2 on=v100,h100")  # fmt: skip
    yield Field(name="edits", label="What if", kind="edits", group="main",
                help="edits with commas between: batch-size=4096,cuda-graph")  # fmt: skip
    yield Field(name="price", label="Price", kind="number", group="main", help="dollars of one GPU for an hour")
    yield Field(name="scaling", label="Scaling", kind="choice", group="main", choices=SCALINGS)
    yield Field(name="against", label="Against trace", kind="source", group="main",
                help="an uploaded trace to compare an uploaded trace with")  # fmt: skip


def _list_scenario_fields() -> Iterable[Field]:
    """Fields of the scenario, but those that name files: the server reads uploads only."""
    for info in list_scenario_fields().values():
        if info.name in ("workload", "on") or info.is_file:
            continue
        choices = _HOSTS if info.name == "host" else tuple(map(str, info.choices))
        kind = "integers" if info.name == "gpus" else "choice" if choices else info.kind
        group = "main" if info.name in _MAIN else info.group
        help = f"{info.described}; several with commas between give a curve" if kind == "integers" else info.described
        yield Field(name=info.name, label=info.label, kind=kind, group=group, help=help, choices=choices, info=info)


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
