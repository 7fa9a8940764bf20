"""The fields of `Scenario` as values: kind, range, choices and words of each, and values checked and read from text."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError, shown, unknown
from traincast.utils.files.reading import read_document, shown_path

GROUPS = {
    "source": "what is trained",
    "hardware": "hardware",
    "sizes": "sizes",
    "numerics": "numerics",
    "program": "program",
    "parallelism": "parallelism",
    "tables": "embedding tables",
    "host": "host",
    "loader": "data loader",
    "costs": "costs",
}
"""Groups of fields and their titles, in the order of the declaration."""
_MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One field of a scenario. `kind` is "integer", "number", "flag", "choice" or "text"; `least` and `most` are the
    limits of numbers; `default` says what stands for a value that is not given."""

    name: str
    kind: str
    group: str
    help: str
    unit: str
    default: str
    choices: tuple[Any, ...]
    least: float
    most: float
    needs: tuple[str, ...]
    is_file: bool

    @property
    def option(self) -> str:
        """The option of the command line: `--batch-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """What a form calls it: `Batch size`."""
        return self.name.replace("_", " ").capitalize() if len(self.name) > 3 else self.name.upper()

    @property
    def described(self) -> str:
        """Help with unit and default, as `--help` and the reference page show it."""
        known = [f"in {self.unit}"] if self.unit and self.unit not in self.help else []
        known += [f"default {self.default}"] if self.default else []
        return f"{self.help} ({'; '.join(known)})" if known else self.help

    def check(self, value: Any) -> None:
        """Rejects a value that the field cannot have."""
        if self.kind == "choice":
            if isinstance(value, bool) or value not in self.choices:
                names = [str(choice) for choice in self.choices]
                raise unknown(self.name, str(value)[:80], names, f"Choose from {', '.join(names)}.")
        elif self.kind == "flag":
            if not isinstance(value, bool):
                raise TraincastError(f"`{self.name}` {shown(value)}: give true or false")
        elif self.kind in ("integer", "number"):
            kinds = int if self.kind == "integer" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                a = "an integer" if self.kind == "integer" else "a number"
                raise TraincastError(f"`{self.name}` {shown(value)}: give {a}, {self.limits}")
            if not self.least <= value <= self.most:
                shown_value = str(value) if isinstance(value, int) else f"{value:g}"
                raise TraincastError(f"`{self.name}` {shown_value} is out of range; give {self.limits}")

    @property
    def limits(self) -> str:
        """The range of a number in words."""
        return f"{self.least:.12g} to {self.most:.12g} {self.unit}".rstrip()

    def parse(self, text: str) -> Any:
        """The value that a text stands for."""
        value: Any = text.strip()
        if self.kind == "flag":
            if value not in ("0", "1", "true", "false"):
                raise TraincastError(f"`{self.name}` {shown(value)}: give 1 or 0")
            return value in ("1", "true")
        if self.kind == "integer" or (self.kind == "choice" and isinstance(self.choices[0], int)):
            plain = value.replace("_", "")
            if not (plain.isascii() and plain.isdecimal() and len(plain) <= _MOST_DIGITS):
                raise TraincastError(f"`{self.name}` {shown(value)}: give an integer, {self.limits}")
            value = int(plain)
        elif self.kind == "number":
            try:
                value = float(value)
            except ValueError:
                raise TraincastError(f"`{self.name}` {shown(value)}: give a number, {self.limits}") from None
        self.check(value)
        return value

    def schema(self) -> dict[str, Any]:
        """The field as JSON Schema has it."""
        if self.kind == "choice":
            kind = "integer" if isinstance(self.choices[0], int) else "string"
            return {"type": kind, "enum": list(self.choices)}
        if self.kind == "flag":
            return {"type": "boolean"}
        if self.kind in ("integer", "number"):
            return {"type": self.kind, "minimum": self.least, "maximum": self.most}
        return {"type": "string", "minLength": 1, "maxLength": 200}


@cache
def scenario_fields() -> dict[str, FieldInfo]:
    """Every field by name, in the order of the declaration."""
    hints = typing.get_type_hints(Scenario, include_extras=True)
    return {name: _field_info(name, hints[name]) for name in Scenario.__struct_fields__}


def _field_info(name: str, hint: Any) -> FieldInfo:
    declared = hint if typing.get_origin(hint) is Annotated else typing.get_args(hint)[0]
    kind, meta = typing.get_args(declared)
    assert isinstance(meta, msgspec.Meta) and meta.extra is not None
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    extra = meta.extra
    return FieldInfo(
        name=name, kind="choice" if choices else {int: "integer", float: "number", bool: "flag"}.get(kind, "text"),
        group=extra["group"], help=str(meta.description), unit=extra["unit"], default=extra["default"],
        choices=choices, least=-math.inf if meta.ge is None else meta.ge,
        most=math.inf if meta.le is None else meta.le, needs=extra["needs"], is_file=extra["file"],
    )  # fmt: skip


def check_values(scenario: Scenario) -> None:
    """Rejects values that a field cannot have, whoever gave them."""
    for name, info in scenario_fields().items():
        value = getattr(scenario, name)
        if info.kind != "text" and value is not None and value is not False:
            info.check(value)


def scenario_from(values: Mapping[str, Any]) -> Scenario:
    """The scenario that keywords describe; an unknown one is named with the nearest known."""
    known = scenario_fields()
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown("keyword", name, known, f"Choose from {', '.join(known)}.")
        if value is None:
            continue
        if name == "fsdp" and isinstance(value, bool):
            value = 2 if value else None
        elif name in ("stage_layers", "overlap") and not isinstance(value, str):
            value = ",".join(str(part) for part in value)
        elif isinstance(value, Path):
            value = str(value)
        plain[name] = value
    return Scenario(**plain)


def read_scenario(path: str | Path, *, also: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a scenario file (YAML, TOML or JSON) as keywords; `also` are other keys that it may have."""
    content, where = read_document(path), shown_path(path)
    known = [*scenario_fields(), *also]
    if not isinstance(content, Mapping):
        raise TraincastError(f"{where}: not a scenario; write fields by name, such as `workload: resnet50`")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    for name, value in values.items():
        if name not in known:
            names = ", ".join(known)
            raise TraincastError(f"{where}: {unknown('field', name, known, f'It may have {names}.')}")
        info = scenario_fields().get(name)
        if info is not None and info.kind == "text" and not isinstance(value, str | int):
            raise TraincastError(f"{where}: `{name}` {shown(value)}: give text")
    return {name: str(value) if _is_text(name) else value for name, value in values.items()}


def _is_text(name: str) -> bool:
    info = scenario_fields().get(name)
    return info is not None and info.kind == "text"
