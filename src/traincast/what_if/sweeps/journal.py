"""Points that are done, line by line in a file beside the result: a sweep that is killed goes on from there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from traincast.errors import TraincastError
from traincast.files.reading import shown_path

_VERSION = 1
_MOST_LINE = 1 << 16


def digest(document: Any) -> str:
    """A short name of what a sweep is: another sweep has another one."""
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


def _text(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n"


class Journal:
    """The file of one sweep; opened to be added to."""

    def __init__(self, out: Path, identity: str, points: int) -> None:
        self.path = out.with_name(out.name + ".points")
        self._points = points
        self._head = {"traincast_sweep": _VERSION, "sweep": identity, "points": points}
        self.done: dict[int, dict[str, Any]] = self._read()
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        if not self.path.stat().st_size:
            self._line(self._head)

    def _read(self) -> dict[int, dict[str, Any]]:
        """Points of an earlier run. A last line that was cut short is not one."""
        if not self.path.exists():
            return {}
        done: dict[int, dict[str, Any]] = {}
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                entry = self._entry(line)
                if number == 0:
                    self._check(entry)
                    continue
                point, row = entry.get("point"), entry.get("row")
                if type(point) is int and 0 <= point < self._points and isinstance(row, dict):
                    done[point] = row
        with self.path.open("r+b") as file:
            file.truncate(whole)
        return done

    def _entry(self, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line[:_MOST_LINE])
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise self._foreign()
        return entry

    def _check(self, head: dict[str, Any]) -> None:
        if head != self._head:
            raise self._foreign()

    def _foreign(self) -> TraincastError:
        name = shown_path(self.path)
        return TraincastError(f"'{name}' is the journal of another sweep; delete it, or write this one elsewhere")

    def add(self, points: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
        """Points are done: they are in the file when this returns."""
        for point, row in zip(points, rows, strict=True):
            self.done[point] = row
            self._file.write(_text({"point": point, "row": row}))
        self._file.flush()

    def _line(self, entry: dict[str, Any]) -> None:
        self._file.write(_text(entry))
        self._file.flush()

    def close(self) -> None:
        """The file stays, to go on from."""
        self._file.close()

    def remove(self) -> None:
        """The result is written: the file is no longer needed."""
        self._file.close()
        self.path.unlink(missing_ok=True)
