"""What can be asked: every field of a scenario that names no file, and those of the question around it. Queries are
checked by them; the form of the live page and the description of the API are written from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from traincast.app.server.guard import Rejection
from traincast.costs.host.cpus import list_cpus
from traincast.costs.host.profile import list_host_profiles
from traincast.hardware.catalog import list_platform_keys
from traincast.models.catalog import list_models
from traincast.models.published import list_published_programs
from traincast.models.transformers.reading import list_built_in_names
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.planner.what_if.sweeps.grid import make_grid
from traincast.simulator.prediction.scaling import SCALINGS
from traincast.simulator.scenario.fields import GROUPS, FieldInfo, list_scenario_fields
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
