"""Signals that end a command become exceptions, so that files half written are removed on the way out."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNAL_EXIT_CODE = 128  # plus the number of the signal, as shells report it


class Terminated(BaseException):
    """The process was asked to end (SIGTERM, SIGHUP)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = _SIGNAL_EXIT_CODE + number


@contextmanager
def signals_as_exceptions() -> Iterator[Callable[[], int | None]]:
    """SIGTERM and SIGHUP raise `Terminated` in the block; yields a function that gives the exit code
    of the first signal that came, Ctrl-C included, or None."""
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def terminate(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise Terminated(number)

    wanted = {signal.SIGINT: interrupt, signal.SIGTERM: terminate, signal.SIGHUP: terminate}
    before = {}
    for number, handler in wanted.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays as it is
            before[number] = signal.signal(number, handler)
    try:
        yield lambda: _SIGNAL_EXIT_CODE + received[0] if received else None
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
