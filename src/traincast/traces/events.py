"""What is kept of a trace, whatever its format: a row per event or node, in growing columns that spill to disk."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from traincast.utils.arrays import IntArray
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


class Kind(IntEnum):
    """What an event is."""

    OP = 0
    ANNOTATION = 1
    RUNTIME = 2
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    SYNC = 6
    OVERHEAD = 7
    MODULE = 8  # the forward pass of an `nn.Module`, as Python's tracer saw it
    DEVICE_ANNOTATION = 9  # from the first to the last kernel that was launched inside of an annotation


DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
"""What runs on devices."""

HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME)
"""What host threads do."""

# every name that Kineto has had for a category that matters
CATEGORIES = {
    "cpu_op": Kind.OP, "Operator": Kind.OP, "operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME, "Runtime": Kind.RUNTIME, "runtime": Kind.RUNTIME, "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME, "privateuse1_runtime": Kind.RUNTIME, "privateuse1_driver": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME, "xpu_driver": Kind.RUNTIME, "mtia_runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL, "Kernel": Kind.KERNEL, "mtia_ccp_events": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY, "Memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET, "Memset": Kind.MEMSET,
    "cuda_sync": Kind.SYNC,
    "overhead": Kind.OVERHEAD,
    "gpu_user_annotation": Kind.DEVICE_ANNOTATION,
}  # fmt: skip

GRAPH_SHIFT = 32
"""Bits of the number of a graph's node inside of its graph; the graph's number stands above."""

EVENT = np.dtype(
    [
        ("start", "i8"),  # nanoseconds, the trace's own clock
        ("duration", "i8"),  # nanoseconds
        ("external", "i8"),  # External id, or -1
        ("correlation", "i8"),  # or -1
        ("record_function", "i8"),  # Record function id, or -1
        ("sequence", "i8"),  # autograd sequence number, of a kernel that of its node in a graph, or -1
        ("bytes", "i8"),  # of a copy or memset, or -1
        ("name", "i4"),  # index into names
        ("details", "i4"),  # index into details
        ("track", "i4"),  # index into tracks: process and thread, or device and stream
        ("device", "i8"),
        ("stream", "i8"),  # 2**32 - 1 where a synchronisation means all of them
        ("waits_for", "i8"),  # correlation of the event record that a synchronisation waits for, or -1
        ("kind", "u1"),
        ("forward_thread", "i8"),
        ("frames", "u2"),  # of the Python stack that was recorded with an op
    ]
)


MEMORY = np.dtype(
    [
        ("time", "i8"),  # nanoseconds, the trace's own clock
        ("device", "i8"),
        ("bytes", "i8"),  # allocated, or negative: given back
        ("allocated", "i8"),  # in all after that, or -1
        ("reserved", "i8"),  # by the allocator after that, or -1
        ("address", "i8"),  # of the block, or -1
    ]
)
"""What a profiler that records memory says of every allocation on a device."""

MOMENT = np.dtype([("time", "i8")])
"""Nanoseconds on the trace's own clock."""

_NOT_RECORDED = (
    "external", "correlation", "record_function", "sequence", "bytes", "device", "stream", "waits_for",
)  # fmt: skip


def make_blank_events(count: int) -> Table:
    """Rows of which nothing is known yet: numbers that may be missing are -1, all others 0."""
    rows = np.zeros(count, dtype=EVENT)
    for column in _NOT_RECORDED:
        rows[column] = -1
    return rows


@dataclass(frozen=True, slots=True)
class CounterRange:
    """A kernel, or another range, and what hardware counters counted in it; `start` only orders ranges."""

    name: str
    start: float
    values: dict[str, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class TimelineTrace:
    """One rank's timeline, as columns in file order (see `EVENT`).

    `details` are the recorded arguments of ops as JSON (shapes, types, collective), shared by equal ops. `notes` say
    in plain words what was odd about the file; `skipped` counts the events that could not be read. `memory` are
    allocations on devices, where they were recorded (see `MEMORY`), `unread` counts events that took time by
    categories that are not understood. `python` are the moments, in order, at which Python's tracer saw calls begin and
    end; none where it was off. `counters` are the ranges of a hardware profiler.
    """

    path: Path
    events: Table
    names: tuple[str, ...]
    details: tuple[bytes, ...]
    tracks: tuple[tuple[int | str, int | str], ...]
    rank: int | None = None
    world_size: int | None = None
    device_name: str = ""
    skipped: int = 0
    notes: tuple[str, ...] = field(default=())
    unread: tuple[tuple[str, int], ...] = ()
    memory: Table = field(default_factory=lambda: np.empty(0, dtype=MEMORY))
    python: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    counters: tuple[CounterRange, ...] = ()

    def count_python_edges(self, begin: int, end: int) -> int:
        """How often a call of Python began or ended in a stretch of time."""
        first, last = np.searchsorted(self.python, (begin, end)).tolist()
        return int(last - first)

    def find_rows(self, *kinds: Kind) -> IntArray:
        """Rows of these kinds, in file order."""
        return np.flatnonzero(np.isin(self.events["kind"], kinds))
