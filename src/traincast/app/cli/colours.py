"""Colours of text on terminals: the verdict stands out, warnings and what does not fit are seen first."""

from __future__ import annotations

import os
import re
from typing import TextIO

_BOLD, _DIM, _RED, _GREEN, _YELLOW, _OFF = (f"\x1b[{code}m" for code in (1, 2, 31, 32, 33, 0))
_RULES = (
    (re.compile(r"^(?:\S.*: )?[\d,.]+ (?:ms|s|min|h|days) per step\b", re.M), _BOLD),
    (re.compile(r"^Measured:|\bfits, |^passed:|^  ok  ", re.M), _GREEN),
    (re.compile(r"^Partly extrapolated:|^warning:|^Worth trying:", re.M), _YELLOW),
    (re.compile(r"\bdoes not fit\b|^Mostly extrapolated:|^failed:|^  FAIL", re.M), _RED),
    (re.compile(r"^(?:note|settings): .*$|[─ ]*─{2}[─ ]*$", re.M), _DIM),
)


def is_coloured(stream: TextIO) -> bool:
    """Whether text on a stream is coloured: on a terminal, unless NO_COLOR is set or the terminal is dumb."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def colour_text(text: str) -> str:
    """The text with escapes for colours.

    >>> colour_text("warning: it is late")
    '\\x1b[33mwarning:\\x1b[0m it is late'
    """
    for pattern, colour in _RULES:
        text = pattern.sub(lambda match, colour=colour: f"{colour}{match[0]}{_OFF}", text)  # type: ignore[misc]
    return text
