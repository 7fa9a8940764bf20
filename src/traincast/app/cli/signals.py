"""Signals that end a command become exceptions, so that files half written are removed on the way out."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN = 0.01  # seconds until a dropped signal is sent again: long enough for the clean-up that dropped it to end
_SIGNAL_EXIT_CODE = 128  # plus the number of the signal, as shells report it


class Terminated(BaseException):
    """The process was asked to end (SIGTERM, SIGHUP)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = _SIGNAL_EXIT_CODE + number


class Signals:
    """The signals that came. Between `begin` and `settle` each of them raises. One that comes before raises in `begin`,
    where it is expected; after `settle` they change nothing, since the command has its result and is about to end."""

    def __init__(self) -> None:
        self._first = 0
        self._begun = self._settled = False
        self._dropped = self._dropping = False

    @property
    def exit_code(self) -> int | None:
        """The exit code of the first signal that came, Ctrl-C included, or None."""
        return _SIGNAL_EXIT_CODE + self._first if self._first else None

    def begin(self) -> None:
        """From now on signals raise, and so does the one that has come already."""
        self._begun = True
        if self._first:
            self._raise(self._first)

    def settle(self) -> None:
        """From now on no signal raises."""
        self._settled = True

    def receive(self, number: int, _: FrameType | None) -> None:
        """Handles a signal."""
        if self._settled:
            return
        self._first = self._first or number
        if self._begun and not self._dropping:
            self._dropped = False
            self._raise(number)

    def unraised(self, what: UnraisableHookArgs) -> None:
        """Sends a signal again that was raised where Python drops exceptions: in a weak reference's callback or in the
        clean-up of an object."""
        if isinstance(what.exc_value, KeyboardInterrupt | Terminated):
            self._dropped = self._dropping = True  # until this ends, what is raised would be dropped as well
            threading.Thread(target=self._send_again, daemon=True).start()
            self._dropping = False
        else:
            sys.__unraisablehook__(what)

    def _send_again(self) -> None:
        """Sends the first signal to the main thread, which it wakes from whatever it waits for, until it is raised."""
        main = threading.main_thread().ident
        time.sleep(_AGAIN)
        while main is not None and self._dropped and not self._settled:
            signal.pthread_kill(main, self._first)
            time.sleep(_AGAIN)

    @staticmethod
    def _raise(number: int) -> NoReturn:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


@contextmanager
def raise_signals() -> Iterator[Signals]:
    """From `begin` on, Ctrl-C raises `KeyboardInterrupt` in the block, SIGTERM and SIGHUP `Terminated`; yields what has
    come."""
    signals = Signals()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays as it is
            before[number] = signal.signal(number, signals.receive)
    hook = sys.unraisablehook
    sys.unraisablehook = signals.unraised
    try:
        yield signals
    finally:
        signals.settle()
        sys.unraisablehook = hook
        for number, earlier in before.items():
            signal.signal(number, earlier)
