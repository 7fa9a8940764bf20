"""A progress bar on stderr, only where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from traincast.display.text import bar

_WIDTH = 30


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the fraction done; silent unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return

    def show(fraction: float) -> None:
        sys.stderr.write(f"\r{label} {bar(fraction, _WIDTH):<{_WIDTH}} {fraction:4.0%}")
        sys.stderr.flush()

    show(0.0)
    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
