"""What readers of traces share: rows gathered as they come, and what to say of a file that is not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from traincast.traces.tables import Interner, TableBuilder
from traincast.utils.errors import TraincastError

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
