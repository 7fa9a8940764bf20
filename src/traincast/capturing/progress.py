"""Who is told how far a capture has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from os import devnull
from pathlib import Path

from traincast.ir.program import Program

Listener = Callable[[str], None]
"""Hears in a few words what is being done now."""

_keeper: ContextVar[Callable[[Program], None] | None] = ContextVar("keeper", default=None)
"""Keeps the first step that is recorded, should the rest of the capture fail."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def notify_listener(listener: Listener | None, keeper: Callable[[Program], None] | None = None) -> Iterator[None]:
    """Lets `listener` hear of captures inside the block, and `keeper` of the first step that one records."""
    token, kept = _listener.set(listener), _keeper.set(keeper)
    try:
        yield
    finally:
        _listener.reset(token)
        _keeper.reset(kept)


def report_progress(text: str) -> None:
    """Tells whoever listens."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


def keep_first_program(program: Program) -> None:
    """Hands the first step that is recorded to whoever keeps it."""
    keeper = _keeper.get()
    if keeper is not None:
        _keeper.set(None)
        keeper(program)


@contextmanager
def hold_prints() -> Iterator[None]:
    """Keeps back what the user's code prints when it is run once more, which it has printed before."""
    with Path(devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
