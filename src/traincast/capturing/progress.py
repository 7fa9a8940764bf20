"""Who is told how far a capture has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]
"""Hears in a few words what is being done now."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def notify_listener(listener: Listener | None) -> Iterator[None]:
    """Lets `listener` hear of captures inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(text: str) -> None:
    """Tells whoever listens."""
    listener = _listener.get()
    if listener is not None:
        listener(text)
