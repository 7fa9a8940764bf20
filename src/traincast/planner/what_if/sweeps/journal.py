"""Points that are done, line by line in a file alongside the result: a sweep that is killed goes on from there."""

from __future__ import annotations

import fcntl
import io
import json
import math
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeGuard

from traincast.planner.what_if.sweeps.points import FIGURES
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path

_VERSION = 1
_MOST_LINE = 1 << 16


def compute_digest(document: Any) -> str:
    """A short name of what a sweep is: another sweep has another one."""
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


def _format_line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n"


def _is_row(row: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a row has all figures of a point, or says why it has none."""
    if not isinstance(row, dict) or isinstance(row.get("error"), str):
        return isinstance(row, dict)
    return set(FIGURES) <= set(row) and all(_is_figure(name, row[name]) for name in FIGURES)


def _is_figure(name: str, value: Any) -> bool:
    """Whether a point can have such a figure: a verdict, a finite number from 0, or no price."""
    if value is None:
        return name == "dollars_per_million_samples"
    return isinstance(value, int | float) and 0 <= value < math.inf


class Journal:
    """The file of one sweep; opened to be added to, by one process at a time."""

    def __init__(self, out: Path, identity: str, points: int) -> None:
        self.path = out.with_name(out.name + ".points")
        self._points = points
        self._head = {"traincast_sweep": _VERSION, "sweep": identity, "points": points}
        self._file = self._open_file()
        try:
            self.done: dict[int, dict[str, Any]] = self._read()
            if not self._file.tell():
                self._write(_format_line(self._head))
        except BaseException:
            self.close()
            raise

    def _open_file(self) -> io.FileIO:
        """The file, which nobody else writes to as long as it is open."""
        try:
            file = self.path.open("a+b", buffering=0)  # a line is written whole, or its beginning is cut off again
        except OSError as error:
            raise self._make_error(error, "write the result elsewhere") from None
        try:
            # a lock of this process alone, which workers that outlive it do not hold
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise TraincastError(
                f"another sweep is writing '{format_path(self.path)}'; wait until it ends, or write this one elsewhere"
            ) from None
        except OSError:  # a file system without locks
            pass
        return file

    def _make_error(self, error: OSError, remedy: str) -> TraincastError:
        return TraincastError(f"cannot write '{format_path(self.path)}': {error.strerror or error}; {remedy}")

    def _read(self) -> dict[int, dict[str, Any]]:
        """Points of an earlier run. A last line that was cut short is not one."""
        done: dict[int, dict[str, Any]] = {}
        whole = 0
        self._file.seek(0)
        reader = io.BufferedReader(self._file)
        for number, line in enumerate(reader):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            entry = self._parse_line(line)
            if number == 0:
                self._check(entry)
                continue
            point, row = entry.get("point"), entry.get("row")
            if type(point) is int and 0 <= point < self._points and _is_row(row):
                done[point] = row
        reader.detach()  # else it closes the file with itself
        self._file.truncate(whole)
        self._file.seek(whole)
        return done

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line[:_MOST_LINE])
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise self._make_foreign_error()
        return entry

    def _check(self, head: dict[str, Any]) -> None:
        if head != self._head:
            raise self._make_foreign_error()

    def _make_foreign_error(self) -> TraincastError:
        name = format_path(self.path)
        return TraincastError(f"'{name}' is the journal of another sweep; delete it, or write this one elsewhere")

    def add(self, points: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
        """Points are done: they are in the file when this returns."""
        self._write(
            "".join(_format_line({"point": point, "row": row}) for point, row in zip(points, rows, strict=True))
        )
        self.done.update(zip(points, rows, strict=True))

    def _write(self, text: str) -> None:
        left = text.encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._make_error(error, "points so far are kept: the same command goes on from them") from None

    def close(self) -> None:
        """The file stays, to go on from."""
        self._file.close()

    def remove(self) -> None:
        """The result is written: the file is no longer needed."""
        self.path.unlink(missing_ok=True)
        self._file.close()
