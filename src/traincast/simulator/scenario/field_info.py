"""What is known of one field of `Scenario`: its kind, range, choices and words; values checked and read from text."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

GROUPS = {
    "source": "what is trained",
    "hardware": "hardware",
    "sizes": "sizes",
    "numerics": "numerics",
    "program": "program",
    "parallelism": "parallelism",
    "memory": "memory",
    "tables": "embedding tables",
    "host": "host",
    "loader": "data loader",
    "costs": "costs",
}
"""Groups of fields and their titles, in the order of the declaration."""
LAWS = ("slower", "faster", "same time", "more memory", "less memory")
"""What a larger value, a later choice or a flag may make of a step, or leave as it is: never the opposite."""
_MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One field of a scenario. `kind` is "integer", "number", "flag", "choice" or "text"; `least` and `most` are the
    limits of numbers; `default` says what stands for a value that is not given, `laws` are of `LAWS`. `option` is that
    of the command line, `described` the help with unit and default."""

    name: str
    option: str
    kind: str
    group: str
    help: str
    described: str
    unit: str
    default: str
    choices: tuple[Any, ...]
    least: float
    most: float
    needs: tuple[str, ...]
    is_file: bool
    laws: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What a form calls it: `Batch size`."""
        words = self.name.replace("_", " ")
        return "GPUs" if words == "gpus" else words.capitalize() if len(words) > 3 else words.upper()

    def check(self, value: Any) -> None:
        """Rejects a value that the field cannot have."""
        if self.kind == "choice":
            if isinstance(value, bool) or value not in self.choices:
                names = [str(choice) for choice in self.choices]
                raise make_unknown_error(self.name, str(value)[:80], names, f"Choose from {', '.join(names)}.")
        elif self.kind == "flag":
            if not isinstance(value, bool):
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give true or false")
        elif self.kind in ("integer", "number"):
            kinds = int if self.kind == "integer" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                a = "an integer" if self.kind == "integer" else "a number"
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give {a}, {self.limits}")
            if not self.least <= value <= self.most:
                shown_value = str(value) if isinstance(value, int) else f"{value:g}"
                raise TraincastError(f"`{self.name}` {shown_value} is out of range; give {self.limits}")

    @property
    def limits(self) -> str:
        """The range of a number in words."""
        return f"{self.least:.20g} to {self.most:.20g} {self.unit}".rstrip()

    def parse(self, text: str) -> Any:
        """The value that a text stands for."""
        value: Any = text.strip()
        if self.kind == "flag":
            if value not in ("0", "1", "true", "false"):
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give 1 or 0")
            return value in ("1", "true")
        if self.kind == "integer" or (self.kind == "choice" and isinstance(self.choices[0], int)):
            plain = value.replace("_", "")
            if not (plain.isascii() and plain.isdecimal() and len(plain) <= _MOST_DIGITS):
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give an integer, {self.limits}")
            value = int(plain)
        elif self.kind == "number":
            try:
                value = float(value)
            except ValueError:
                raise TraincastError(f"`{self.name}` {shorten_value(value)}: give a number, {self.limits}") from None
        self.check(value)
        return value


def make_field_info(name: str, hint: Any) -> FieldInfo:
    """A field from its annotation."""
    declared = hint if typing.get_origin(hint) is Annotated else typing.get_args(hint)[0]
    kind, meta = typing.get_args(declared)
    assert isinstance(meta, msgspec.Meta) and meta.extra is not None
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    extra, words = meta.extra, str(meta.description)
    known = [f"in {extra['unit']}"] if extra["unit"] and extra["unit"] not in words else []
    known += [f"default {extra['default']}"] if extra["default"] else []
    return FieldInfo(
        name=name, option="--" + name.replace("_", "-"),
        kind="choice" if choices else {int: "integer", float: "number", bool: "flag"}.get(kind, "text"),
        group=extra["group"], help=words, described=f"{words} ({'; '.join(known)})" if known else words,
        unit=extra["unit"], default=extra["default"], choices=choices, least=-math.inf if meta.ge is None else meta.ge,
        most=math.inf if meta.le is None else meta.le, needs=extra["needs"], is_file=extra["file"],
        laws=tuple(law for law in extra["law"].split(", ") if law),
    )  # fmt: skip
