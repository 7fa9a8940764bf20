"""Where results go: one JSON document, text or tables, files through a temporary name; colours, progress, names of
options."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from traincast.utils.display.text import format_bar, wrap_words
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import check_output, write_together
from traincast.utils.results import Result, encode_csv

TABLE_FORMATS = ("csv", "parquet")
Shown = TypeVar("Shown", bound=Result)
_PARAMETER = re.compile(r"`([a-z0-9_]+)(?:='?([^'`]*)'?)?`")
_BOLD, _DIM, _RED, _GREEN, _YELLOW, _OFF = (f"\x1b[{code}m" for code in (1, 2, 31, 32, 33, 0))
_RULES = (
    (re.compile(r"^(?:\S.*: )?[\d,.]+ (?:ms|s|min|h|days) per step\b", re.M), _BOLD),
    (re.compile(r"^Measured:|\bfits, |^passed:|^  ok  ", re.M), _GREEN),
    (re.compile(r"^Partly extrapolated:|^warning:|^Worth trying:", re.M), _YELLOW),
    (re.compile(r"\bdoes not fit\b|^Mostly extrapolated:|^failed:|^  FAIL", re.M), _RED),
    (re.compile(r"^(?:note|settings): .*(?:\n  \S.*)*$|[─ ]*─{2}[─ ]*$", re.M), _DIM),
)


def check_outputs(*paths: Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Rejects files that cannot be written, before any work: two of one name, an input, a folder, a device, a link."""
    wanted = [path for path in paths if path is not None]
    for path in wanted:
        check_output(path, inputs=[source for source in inputs if source is not None])
        if wanted.count(path) > 1:
            raise TraincastError(f"'{format_path(path)}' would be written twice; give two paths")


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    with _name_stdout_errors():
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")


def print_text(text: str) -> None:
    """Text on stdout."""
    with _name_stdout_errors():
        text = fit_lines(text, sys.stdout)
        shown = colour_text(text) if is_coloured(sys.stdout) else text
        sys.stdout.write(shown if shown.endswith("\n") else shown + "\n")


def get_columns(stream: TextIO) -> int | None:
    """Columns of a terminal; None of anything else."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fit_lines(text: str, stream: TextIO) -> str:
    """Text whose sentences are wrapped at words where a terminal is narrower; commands to copy stay whole."""
    columns = get_columns(stream)
    if columns is None:
        return text
    return "\n".join(
        line if len(line) <= columns or line.startswith("  traincast ") else _wrap_line(line, columns)
        for line in text.split("\n")
    )


def _wrap_line(line: str, columns: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return "\n".join(wrap_words(line.strip(), columns, indent=indent, hanging=f"{indent}  ", long_words=False))


@contextmanager
def _name_stdout_errors() -> Iterator[None]:
    """Names stdout where it is what cannot be written; a reader that has gone is no complaint."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TraincastError(f"cannot write to stdout: {error.strerror}") from None


def print_result(
    result: Shown, text: Callable[[Shown], str], *, as_json: bool, options: Mapping[str, str] | None = None
) -> None:
    """A result on stdout: its document, or its page as text with parameters named as options of the command."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_text(name_options(text(result), options or {}))


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


def name_options(message: str, options: Mapping[str, str]) -> str:
    """A message with the parameters it names between backticks written as options of the command.

    >>> name_options("leave out `seq_len`", {"seq_len": "--seq-len"})
    'leave out --seq-len'
    >>> name_options("add `mode='inference'` to `predict`", {"mode": "--mode"})
    'add --mode inference to `predict`'
    """

    def written(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in options:
            return match[0]
        return options[name] if value is None else f"{options[name]} {value}"

    return _PARAMETER.sub(written, message)


def check_folder(folder: Path | None) -> None:
    """Rejects a folder that is not there, before any work."""
    if folder is not None and not folder.is_dir():
        raise TraincastError(f"there is no folder '{format_path(folder)}' for the tables; make it first")


def write_tables(result: Result, folder: Path, kind: str) -> list[Path]:
    """Writes every table of a result that has rows as `NAME.csv` or `NAME.parquet`; returns the files."""
    contents: dict[Path, bytes] = {}
    if kind == "parquet":
        for name, frame in result.frames().items():
            buffer = io.BytesIO()
            frame.write_parquet(buffer)
            contents[folder / f"{name}.parquet"] = buffer.getvalue()
    else:
        contents = {folder / f"{name}.csv": encode_csv(rows) for name, rows in result.records().items() if rows}
    write_together(contents)
    return list(contents)


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
