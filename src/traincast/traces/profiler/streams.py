"""Every stream by itself: how long it worked and stood idle; and how many launches waited over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.events import Kind
from traincast.traces.intervals import Intervals
from traincast.traces.launch_queue import LaunchQueue
from traincast.traces.link import Linked
from traincast.traces.profiler.kernels import find_kernels_in_steps
from traincast.utils.arrays import IntArray, group_positions

_MOST_POINTS = 1_000  # of a curve: the highest of as many stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """One stream in all steps, seconds: busy, and idle from its first kernel to its last; `gap_longest` is the longest
    time between two of its kernels. `bytes` are those of its copies, `bytes_per_second` while they ran."""

    device: int
    stream: int
    kernels: int
    total: float
    idle: float
    gap_longest: float
    bytes: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePoint:
    """The most launches that waited behind a call in a stretch of time, seconds after the first step began."""

    seconds: float
    waiting: int


def make_stream_rows(linked: Linked) -> tuple[StreamRow, ...]:
    """The streams of a trace, the busiest first."""
    rows = find_kernels_in_steps(linked)
    made = [_make_row(linked, rows[places]) for _, places in group_positions(linked.stream[rows])]
    return tuple(sorted(made, key=lambda row: -row.total))


def _make_row(linked: Linked, rows: IntArray) -> StreamRow:
    events = linked.events
    busy = Intervals.from_spans(events["start"][rows], linked.end[rows])
    gaps = busy.start[1:] - busy.end[:-1]
    copies = rows[(events["kind"][rows] == Kind.MEMCPY) & (events["bytes"][rows] > 0)]
    moved, took = int(events["bytes"][copies].sum()), 1e-9 * float(events["duration"][copies].sum())
    return StreamRow(
        device=int(events["device"][rows[0]]), stream=int(events["stream"][rows[0]]), kernels=len(rows),
        total=1e-9 * busy.total, idle=1e-9 * float(gaps.sum()), gap_longest=1e-9 * float(gaps.max(initial=0)),
        bytes=moved, bytes_per_second=moved / took if took else 0.0,
    )  # fmt: skip


def make_queue_points(linked: Linked, queue: LaunchQueue) -> tuple[QueuePoint, ...]:
    """How many launches waited, by the most of each of a thousand stretches; nothing where none was recorded."""
    calls = np.flatnonzero(linked.is_launch & (linked.step >= 0))
    if not len(calls) or not linked.launched:
        return ()
    calls = calls[np.argsort(linked.events["start"][calls], kind="stable")]
    edges = np.unique(np.linspace(0, len(calls), min(len(calls), _MOST_POINTS) + 1).astype(np.int64))
    origin = linked.steps[0].start
    return tuple(
        QueuePoint(
            seconds=1e-9 * (int(linked.events["start"][calls[low]]) - origin),
            waiting=int(queue.waiting[calls[low:high]].max()),
        )
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    )
