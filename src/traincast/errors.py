"""The one exception type for a user's mistake: a single clear line, exit code 2 at the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TraincastError(ValueError):
    """Bad input. The message names the thing that is wrong and the remedy, on one line."""


def unknown(kind: str, name: str, known: Iterable[str], remedy: str) -> TraincastError:
    """An error for a name nobody knows, with the nearest known names."""
    nearest = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    hint = f" Did you mean {', '.join(nearest)}?" if nearest else ""
    return TraincastError(f"unknown {kind} '{name}'.{hint} {remedy}")
