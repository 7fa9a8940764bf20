"""Where results go: one JSON document or text on stdout, files through a temporary name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from traincast.results import Result

Shown = TypeVar("Shown", bound=Result)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def print_text(text: str) -> None:
    """Text on stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_result(result: Shown, text: Callable[[Shown], str], *, as_json: bool) -> None:
    """A result on stdout: its document, or its page as text."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_text(text(result))
