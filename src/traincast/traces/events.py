"""What is kept of a timeline, whatever format it was written in: one row per event that took host or device time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np

from traincast.traces.tables import Table
from traincast.utils.arrays import IntArray


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

EVENT = np.dtype(
    [
        ("start", "i8"),  # nanoseconds, the trace's own clock
        ("duration", "i8"),  # nanoseconds
        ("external", "i8"),  # External id, or -1
        ("correlation", "i8"),  # or -1
        ("record_function", "i8"),  # Record function id, or -1
        ("sequence", "i8"),  # autograd sequence number, or -1
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


@dataclass(frozen=True, eq=False, kw_only=True)
class TimelineTrace:
    """One rank's timeline, as columns in file order (see `EVENT`).

    `details` are the recorded arguments of ops as JSON (shapes, types, collective), shared by equal ops. `notes` say
    in plain words what was odd about the file; `skipped` counts the events that could not be read. `memory` are
    allocations on devices, where they were recorded (see `MEMORY`), `unread` counts events that took time by
    categories that are not understood. `python` are the moments, in order, at which Python's tracer saw calls begin and
    end; none where it was off.
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

    def count_python_edges(self, begin: int, end: int) -> int:
        """How often a call of Python began or ended in a stretch of time."""
        first, last = np.searchsorted(self.python, (begin, end)).tolist()
        return int(last - first)

    def find_rows(self, *kinds: Kind) -> IntArray:
        """Rows of these kinds, in file order."""
        return np.flatnonzero(np.isin(self.events["kind"], kinds))
