"""Reading JSON of untrusted input: every complaint names the field, and a file is read only when it is small."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value


def shorten_name(name: str) -> str:
    """A name for a message: short, on one line."""
    return repr(name[:80])[1:-1]


def check_mapping(value: Any, where: str, allowed: Iterable[str] | None = None) -> Mapping[str, Any]:
    """A JSON object, with no other keys than those allowed."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TraincastError(f"{where} is {shorten_value(value)}; give an object")
    names = None if allowed is None else tuple(allowed)
    for key in value if names is not None else ():
        if names is not None and key not in names:
            raise make_unknown_error("field", shorten_name(key), names, f"{where} may have {', '.join(names)}.")
    return value


def check_sequence(value: Any, where: str, most: int) -> Sequence[Any]:
    """A JSON list of at most `most` items."""
    if not isinstance(value, list | tuple):
        raise TraincastError(f"{where} is {shorten_value(value)}; give a list")
    if len(value) > most:
        raise TraincastError(f"{where} has {len(value)} items; at most {most} are read")
    return value


def check_text(value: Any, where: str) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise TraincastError(f"{where} is {shorten_value(value)}; give a text")
    return value


def check_integer(value: Any, where: str, least: int, most: int) -> int:
    """An integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraincastError(f"{where} is {shorten_value(value)}; give an integer")
    if not least <= value <= most:
        raise TraincastError(f"{where} is {shorten_value(value)}; give an integer from {least} to {most}")
    return value


def check_number(value: Any, where: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TraincastError(f"{where} is {shorten_value(value)}; give a number")
    try:
        result = float(value)
    except OverflowError:
        result = float("inf")
    if not isfinite(result):
        raise TraincastError(f"{where} is {shorten_value(value)}; give a finite number")
    return result


def check_choice(value: Any, where: str, choices: Iterable[str]) -> str:
    """One of the choices."""
    names = tuple(choices)
    if not isinstance(value, str) or value not in names:
        word = shorten_name(value) if isinstance(value, str) else shorten_value(value)
        raise make_unknown_error(where, word, names, f"Choose {', '.join(names)}.")
    return value
