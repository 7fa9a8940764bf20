"""The command line: finds the command, runs it, and is the one place that turns errors and signals into exit codes."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from traincast.app.cli.output import fit_lines, get_columns, name_options
from traincast.app.cli.registry import BAD_INPUT, OK, build_parsers, list_commands, reject_unknown
from traincast.utils.display.text import use_width
from traincast.utils.errors import TraincastError, check_memory_limit, make_unknown_error
from traincast.utils.version import __version__

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


INTERNAL_ERROR, INTERRUPTED = 70, 130  # as sysexits.h and shells have them
_LEAST_MEMORY, _SPARE_MEMORY = 256 << 20, 32 << 20  # bytes of address space
_MOST_CHARACTERS = 1500  # of a message: a screenful; the longest honest one lists the fields of a platform

# what only some commands need -> the extra that installs it
OPTIONAL = {
    "torch": "capture",
    "polars": "data",
    "threadpoolctl": "data",
    "h11": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "mcp": "mcp",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    if argv is not None:
        return _run(argv, Signals())
    try:
        check_memory_limit(_LEAST_MEMORY, "traincast")
    except TraincastError as error:
        return _print_message(str(error), BAD_INPUT)
    with raise_signals() as signals:
        return _run(sys.argv[1:], signals)


def _run(argv: list[str], signals: Signals) -> int:
    """Parses, runs the command, and turns what goes wrong into a line and an exit code."""
    arguments = argparse.Namespace(options={})
    try:
        signals.begin()
        _prepare_streams()
        try:
            arguments = _parse(argv)
            with use_width(get_columns(sys.stdout) or math.inf):
                return int(arguments.run(arguments))
        finally:
            _flush_output()
    except KeyboardInterrupt:
        signals.settle()
        return _report_end(INTERRUPTED)
    except Terminated as end:
        signals.settle()
        return _report_end(end.exit_code)
    except Exception as error:
        signals.settle()
        # a signal inside an import of C code comes out as that import's failure
        signalled = signals.exit_code
        return _report_end(signalled) if signalled else _report_error(error, arguments)


def _report_error(error: Exception, arguments: argparse.Namespace) -> int:
    """What went wrong, in one line."""
    if isinstance(error, MemoryError) or (not isinstance(error, TraincastError) and _is_memory_short()):
        return _print_message("not enough memory for this input; give a smaller one", BAD_INPUT)
    if isinstance(error, TraincastError):
        return _print_message(name_options(str(error), arguments.options), BAD_INPUT)
    if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
        return _print_message(f"this needs {error.name}: pip install 'traincast[{OPTIONAL[error.name]}]'", BAD_INPUT)
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return OK
    if isinstance(error, OSError):  # a file that cannot be read or written; after BrokenPipeError, which is one too
        return _print_message(_describe_os_error(error), BAD_INPUT)
    return _report_internal_error(error)


def _is_memory_short() -> bool:
    """Whether the system has no more to give: then imports fail in the middle, in words that say nothing of it."""
    try:
        bytearray(_SPARE_MEMORY)
    except MemoryError:
        return True
    return False


def _report_end(code: int) -> int:
    return _print_message("interrupted" if code == INTERRUPTED else "terminated", code)


def _prepare_streams() -> None:
    """Streams that take any text: a closed stderr swallows it, characters that stdout cannot show become `?`."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    if sys.stdout is None:
        raise TraincastError("stdout is closed; send it to a file or to /dev/null")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _flush_output() -> None:
    """Writes what stdout still holds: what cannot be written is to be known now, not when Python ends."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise TraincastError(f"cannot write to stdout: {error.strerror}") from None


def _describe_os_error(error: OSError) -> str:
    """What the system complains of, with the file's name where it has one."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"'{error.filename}': {reason}" if error.filename else reason


def _drop_output() -> None:
    """Sends what stdout still holds nowhere: Python would try to write it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_internal_error(error: Exception) -> int:
    """A mistake of ours in one line that names its place, to be reported; with TRAINCAST_DEBUG set, the whole of it."""
    if os.environ.get("TRAINCAST_DEBUG"):
        raise error
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return _print_message(
        f"internal error, please report it with the command and its input: {what} (version {__version__})",
        INTERNAL_ERROR,
    )


def _print_message(message: str, code: int) -> int:
    """One printable line on stderr, however long and strange the names in it; returns the exit code."""
    if not message.isprintable():
        message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    if len(message) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        message = f"{message[:half]} ... {message[-half:]}"
    print(fit_lines(f"traincast: {message}", sys.stderr), file=sys.stderr)
    return code


def _parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the command that is asked for; `run` is what it does, `options` how its parameters are
    written. Without any, the overview is what is asked for."""
    words = [word for word in argv if not word.startswith("-")][:1]
    parser, made = build_parsers(words)
    if not argv:
        argv = ["--help"]
    if words and argv[0] == words[0] and not made:
        known = (*list_commands(), "--help", "--version")
        raise make_unknown_error("command", words[0], known, "'traincast --help' lists the commands.")
    own = argv
    if argv[:1] in (["capture"], ["shard"]) and "--" in argv:  # what follows is for the script that is captured
        own = argv[: argv.index("--")]
    args, extra = parser.parse_known_args(own)
    if extra:
        reject_unknown(extra, made[words[0]], vars(args))
    if own is not argv:
        args.arguments = argv[len(own) + 1 :]
    return args
