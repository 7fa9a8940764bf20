"""CPUs by their names: how long the host part of a step takes on one, from its generation and clock."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_MARKS = re.compile(r"\((?:r|tm|c)\)|\bcpu\b|\bprocessors?\b|\b\d+-cores?\b|@.*$|[,()]", re.IGNORECASE)
_STATED_CLOCK = re.compile(r"@\s*(\d+(?:\.\d+)?)\s*ghz", re.IGNORECASE)
_TURBO = 1.3  # of the base clock that a name states, where the model is not listed


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU: its name in lower case without marks, and how many times as long as `server-2022` its host code takes.
    `spread` is the log-sigma of that."""

    name: str
    slowness: float
    spread: float


@cache
def find_cpu(text: str) -> Cpu | None:
    """The CPU that a name such as "AMD EPYC 7742 64-Core Processor" means; None where no generation is recognised."""
    known = _read_cpus()
    name = " ".join(_MARKS.sub(" ", text.lower()).replace("+", " ").split())
    generation = next((each for each in known["generation"] if re.search(each["pattern"], name)), None)
    if generation is None:
        return None
    listed = [ghz for model, ghz in known["boost_ghz"].items() if re.search(rf"\b{re.escape(model)}", name)]
    stated = _STATED_CLOCK.search(text)
    clock = listed[0] if listed else _TURBO * float(stated[1]) if stated else float(generation["ghz"])
    slowness = (known["reference"] / (generation["per_clock"] * clock)) ** known["exponent"]
    return Cpu(name, slowness, known["spread"])


def list_cpus() -> tuple[str, ...]:
    """Models whose clock is listed, in lower case; others are recognised by their generation."""
    return tuple(_read_cpus()["boost_ghz"])


@cache
def _read_cpus() -> dict[str, Any]:
    return tomllib.loads((files("traincast.costs.host") / "data" / "cpus.toml").read_text(encoding="utf-8"))
