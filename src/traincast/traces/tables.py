"""What readers of traces share: growing columns that spill to disk, string tables, rows gathered as they come, and what
to say of a file that is not whole."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from traincast.utils.errors import TraincastError

Table = npt.NDArray[np.void]
K = TypeVar("K", bound=Hashable)

_ROWS_IN_MEMORY = 1 << 16  # about 10 MB of events
_MAX_TEXT = 1 << 26  # bytes of distinct names or argument lists


class Interner(dict[K, int]):
    """Numbers things in the order they first appear: `ids[thing]`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._bytes = what, 0

    def __missing__(self, key: K) -> int:
        self._bytes += len(key) if isinstance(key, (str, bytes)) else 64
        if self._bytes > _MAX_TEXT:
            raise TraincastError(f"the trace has more than {_MAX_TEXT >> 20} MB of distinct {self._what}")
        number = self[key] = len(self)
        return number


class TableBuilder:
    """Appends blocks of rows; past a size, rows go to an unnamed temporary file that is mapped back at the end."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._blocks: list[Table] = []
        self._held, self._spilled = 0, 0
        self._file: IO[bytes] | None = None

    def append_block(self, block: Table) -> None:
        """Adds rows of the table's dtype."""
        self._blocks.append(block)
        self._held += len(block)
        if self._held > _ROWS_IN_MEMORY:
            self._spill_to_disk()

    def finish_table(self) -> Table:
        """All rows, in memory or mapped; the builder is used up."""
        if self._file is None:
            return np.concatenate(self._blocks) if self._blocks else np.empty(0, dtype=self.dtype)
        self._spill_to_disk()
        self._file.flush()
        mapped = np.memmap(self._file, dtype=self.dtype, mode="r+", shape=(self._spilled,))
        return mapped.view(np.ndarray)  # single values of a memmap take five times as long to read

    def _spill_to_disk(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="traincast-")  # noqa: SIM115 - lives as long as the map
            for block in self._blocks:
                self._file.write(block.tobytes())
        except OSError as error:
            raise TraincastError(
                f"no room for the trace's columns in '{tempfile.gettempdir()}': {error.strerror}"
            ) from None
        self._blocks = []
        self._spilled += self._held
        self._held = 0


UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What decoding of damaged JSON raises."""
ENDS_EARLY = "the file ends early"
"""How the note about a file that was cut off or damaged begins."""

LIMIT = 1 << 62
"""No number of a trace may be larger: columns are int64, and sums of two numbers must not overflow."""

Int = Annotated[int, msgspec.Meta(ge=-LIMIT, le=LIMIT)]
"""An integer that a column can hold."""

# a profiler that is cut off leaves a row or two amiss; a file with more of them than this is something else
_MAX_SKIPPED_SHARE, _MAX_SKIPPED = 0.01, 3


class RowSink:
    """Gathers the rows of one file; `seen`, `kept` and `skipped` count them.

    `WHAT` is what a row is called in messages, `MEMBERS` the members of the document, besides the rows, to keep.
    """

    WHAT: ClassVar[str]
    MEMBERS: ClassVar[tuple[str, ...]]

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.table = TableBuilder(dtype)
        self.names: Interner[str] = Interner("names")
        self.details: Interner[bytes] = Interner("op arguments")
        self.details[b""]  # number 0: no arguments were recorded
        self.members: dict[str, Any] = {}
        self.seen = self.kept = self.skipped = 0

    def add_member(self, key: str, raw: bytes) -> None:
        """Keeps a member of the document; None where it makes no sense."""
        if key in self.MEMBERS:
            try:
                self.members[key] = msgspec.json.decode(raw)
            except UNREADABLE:
                self.members[key] = None

    def check_rows(self, path: Path, ended: str, nothing: str) -> list[str]:
        """What was odd about the file, in plain words. Rejects one that has no rows (`nothing` says so), or in which
        too many make no sense; `ended` says why it ended early ("" when it did not)."""
        if not self.kept:
            raise TraincastError(f"'{path}' has {nothing}" + (f"; it ends early: {ended}" if ended else ""))
        if self.skipped > max(_MAX_SKIPPED_SHARE * self.seen, _MAX_SKIPPED):
            raise TraincastError(f"'{path}' is too damaged: {self.skipped} of {self.seen} {self.WHAT} make no sense")
        notes = [f"{ENDS_EARLY} ({ended}); the {self.WHAT} before that were read"] if ended else []
        if self.skipped:
            notes.append(f"{self.skipped} of {self.seen} {self.WHAT} make no sense and were left out")
        return notes
