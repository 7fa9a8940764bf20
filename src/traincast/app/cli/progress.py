"""Progress on stderr, as a bar or in words, only where a person watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from traincast.utils.display.text import format_bar

_WIDTH = 30
_LEAST_FRACTION, _LEAST_SECONDS = 0.01, 1.0  # before which the time left is a guess
_MINUTES_FROM = 100.0  # seconds
_MOST_CHARACTERS = 78  # a longer line would wrap, and only its last row be wiped


@contextmanager
def show_progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the fraction done, and shows it with the time left; silent unless stderr is a
    terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    begin = time.monotonic()

    def show(fraction: float) -> None:
        left = format_time_left(fraction, time.monotonic() - begin)
        sys.stderr.write(f"\r{label} {format_bar(fraction, _WIDTH):<{_WIDTH}} {fraction:4.0%}{left}\x1b[K")
        sys.stderr.flush()

    show(0.0)
    with _wipe_line():
        yield show


def format_time_left(fraction: float, seconds: float) -> str:
    """What is left when so much was done in this many seconds; nothing before that says anything.

    >>> time_left(0.25, 60.0)
    ', 3 min left'
    """
    if fraction < _LEAST_FRACTION or seconds < _LEAST_SECONDS or fraction >= 1.0:
        return ""
    left = seconds * (1.0 - fraction) / fraction
    return f", {left / 60:.0f} min left" if left >= _MINUTES_FROM else f", {left:.0f} s left"


@contextmanager
def show_progress_line(label: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes what is being done; silent unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    begin, terminal = time.monotonic(), sys.stderr  # which a caller may redirect

    def show(text: str) -> None:
        line = f"{label}: {text} ({time.monotonic() - begin:.0f} s)"
        terminal.write(f"\r\x1b[K{line[:_MOST_CHARACTERS]}")
        terminal.flush()

    with _wipe_line():
        yield show


@contextmanager
def _wipe_line() -> Iterator[None]:
    """Clears the line at the end."""
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
