"""A measured timeline as instructions for the simulation.

Host segments, launch calls and kernels keep their measured lengths. What is simulated is everything that waits:
kernels for their stream, streams for each other and for the device, the host for the device and for room in the queue
of launches, threads for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.simulator.schedule import Code, Schedule
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.slowdowns import Lateness, LaunchQueue, compute_lateness, launch_queue
from traincast.utils.arrays import FloatArray, IntArray


class RunningStreams:
    """What had been launched on every stream, asked for moments that do not go back."""

    def __init__(self, linked: Linked) -> None:
        rows, launch = linked.device, linked.launch[linked.device]
        before = linked.events["start"].min(initial=0) - 1  # work from before the trace had been launched by then
        issued = np.where(launch >= 0, linked.events["start"][np.maximum(launch, 0)], before)
        order = np.argsort(issued, kind="stable")
        self._issued, self._end = issued[order].tolist(), linked.end[rows][order].tolist()
        self._stream = linked.stream[rows][order].tolist()
        self._next = 0
        self._until: dict[int, int] = {}  # stream -> when all that was launched on it had ended

    def find_running(self, moment: int) -> dict[int, int]:
        """The streams with work launched before this moment that had not ended by then, and when all of it had."""
        while self._next < len(self._issued) and self._issued[self._next] < moment:
            stream, end = self._stream[self._next], self._end[self._next]
            self._until[stream] = max(end, self._until.get(stream, end))
            self._next += 1
        self._until = {stream: end for stream, end in self._until.items() if end > moment}
        return self._until


class EndedThreads:
    """When every thread's last point ended, asked for moments that do not go back."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._number: dict[int, int] = {}  # thread -> place in the order of first points
        self._going: list[tuple[int, int]] = []  # heap of (end, thread) that may still are ahead
        self._ended: list[tuple[int, int, int]] = []  # heap of (-end, number, thread), the latest first

    def add_point(self, thread: int, end: int) -> None:
        """A further point of a thread."""
        self._last[thread] = end
        self._number.setdefault(thread, len(self._number))
        heappush(self._going, (end, thread))

    def find_latest(self, moment: int, *, without: int) -> tuple[int, int]:
        """The other thread whose last point ended latest by this moment, and when; (-1, 0) for none."""
        while self._going and self._going[0][0] <= moment:
            end, thread = heappop(self._going)
            heappush(self._ended, (-end, self._number[thread], thread))
        aside, result = None, (-1, 0)
        while self._ended:
            entry = self._ended[0]
            if self._last[entry[2]] == -entry[0]:
                if entry[2] != without:
                    result = (entry[2], -entry[0])
                    break
                aside = entry
            heappop(self._ended)
        if aside is not None:
            heappush(self._ended, aside)
        return result


_NS = 1e-9  # seconds: traces count in nanoseconds, the simulation in seconds
STEP_EDGE = -2
"""The `row` of an instruction that stands for the start or end of a step."""

_NOTHING = np.empty(0, dtype=np.int64)
_ROWS = 1 << 16  # instructions held as Python's own numbers
_COLUMNS = (*(np.int32,) * 4, *(np.float64,) * 3, *(np.int64,) * 4)  # types of the parts of an instruction
JOIN_NS = 20_000
"""A thread silent for longer than this (nanoseconds) while another works is taken to wait for it: an op that launches
nothing takes less."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TimelineInstructions:
    """Instructions with their measured times in seconds; `row` is the event behind each, -1, or -2 at a step's edge.

    `point` is the runtime call that an instruction belongs to or leads to (-1 for a step's edge). An instruction that
    is the host's way to that call has `gap_begin` and `gap_end`, nanoseconds on the trace's clock; others have -1.
    `origin` is the moment at which the simulation begins, on the same clock. `kept_seconds` is how long a kernel that
    could have begun was kept by what no trace shows, `gap` the usual time between two kernels of a queue, both in
    seconds.
    """

    origin: int
    gap: float
    schedule: Schedule
    host_seconds: FloatArray
    kernel_seconds: FloatArray
    kept_seconds: FloatArray
    row: IntArray
    point: IntArray
    gap_begin: IntArray
    gap_end: IntArray

    @property
    def device_seconds(self) -> FloatArray:
        """How long each launch has its stream: kept, then running."""
        return np.asarray(self.kernel_seconds + self.kept_seconds)


@dataclass(frozen=True, slots=True)
class _Point:
    """Something a host thread does at one moment: a call, or the start or end of a step."""

    start: int
    end: int
    thread: int
    row: int


def make_timeline_instructions(linked: Linked) -> TimelineInstructions:
    """The timeline as instructions, with all times as measured."""
    return _Builder(linked).build_instructions(_list_points(linked))


def _list_points(linked: Linked) -> list[_Point]:
    """Runtime calls that touch the device and the step markers, in the order in which the host came to them."""
    events = linked.events
    calls = np.flatnonzero(linked.is_launch | linked.is_synchronise)
    calls = calls[linked.thread[calls] >= 0]
    points = [
        _Point(int(events["start"][row]), int(linked.end[row]), int(linked.thread[row]), row) for row in calls.tolist()
    ]
    for step in linked.steps:
        points.append(_Point(step.start, step.start, 0, -1))
    points.append(_Point(linked.steps[-1].end, linked.steps[-1].end, 0, -1))
    return sorted(points, key=lambda point: (point.start, point.end))


class _Builder:
    """Emits instructions for points; every gap between two points of a thread is host time."""

    def __init__(self, linked: Linked) -> None:
        self.linked = linked
        # code thread target event host kernel kept row point gap_begin gap_end
        self.rows: list[tuple[int, int, int, int, float, float, float, int, int, int, int]] = []
        self.blocks: list[list[npt.NDArray[Any]]] = []
        self.point = -1
        self.last: dict[int, int] = {}  # thread -> end of its last point
        self.ended = EndedThreads()
        self.late, self.queue, self.running = compute_lateness(linked), launch_queue(linked), RunningStreams(linked)
        self.event = _number_event_sources(linked, self.late, self.queue)
        self.before, self.followers = _find_kernels_without_call(linked)
        self.begin = 0

    def build_instructions(self, points: list[_Point]) -> TimelineInstructions:
        self.begin = points[0].start
        for row in self.before:
            self._add_backlog(row)
        for point in points:
            self.point = point.row
            self._add_gap(point)
            if point.row < 0:
                self._emit_instruction(Code.HOST, point.thread, row=STEP_EDGE)
            elif self.linked.is_synchronise[point.row] and point.row not in self.linked.kernels_of:
                self._add_synchronisation(point)
            else:
                self._add_launch(point)
            self.last[point.thread] = point.end
            self.ended.add_point(point.thread, point.end)
        return self._finish_instructions()

    def _emit_instruction(
        self,
        code: Code,
        thread: int,
        *,
        target: int = -1,
        event: int = -1,
        host: int = 0,
        kernel: int = 0,
        kept: int = 0,
        row: int = -1,
        gap: tuple[int, int] = (-1, -1),
    ) -> None:
        self.rows.append((code, thread, target, event, _NS * host, _NS * kernel, _NS * kept, row, self.point, *gap))
        if len(self.rows) == _ROWS:
            self._gather_columns()

    def _gather_columns(self) -> None:
        """Rows as columns, which take a fifth of the memory."""
        columns = zip(*self.rows, strict=True)
        self.blocks.append([np.array(column, dtype) for column, dtype in zip(columns, _COLUMNS, strict=True)])
        self.rows = []

    def _add_backlog(self, row: int) -> None:
        """A kernel from before the trace: it runs when it ran, as far as that is inside the simulation."""
        start, end = int(self.linked.events["start"][row]), int(self.linked.end[row])
        if end <= self.begin:
            return
        since = max(int(self.late.free[row]), self.begin)
        kept = max(start - since - (self.late.gap if since > self.begin else 0), 0)
        self._put_kernel(0, row, host=0, kernel=end - max(start, self.begin), kept=kept)

    def _put_kernel(self, thread: int, row: int, *, host: int, kernel: int, kept: int) -> None:
        """Puts a kernel on its stream, and says so to whoever waits for its end."""
        stream = int(self.linked.stream[row])
        self._emit_instruction(Code.LAUNCH, thread, target=stream, host=host, kernel=kernel, kept=kept, row=row)
        if row in self.event:
            self._emit_instruction(Code.EVENT_RECORD, thread, target=stream, event=self.event[row])

    def _add_gap(self, point: _Point) -> None:
        """Host time since the thread's last point; after a silence, it waited for the thread that worked last."""
        previous = self.last.get(point.thread, self.begin)
        if point.start - previous > JOIN_NS:
            other, worked_until = self.ended.find_latest(point.start, without=point.thread)
            if other >= 0 and worked_until > previous and self._is_silent(point.thread, previous, point.start):
                self._emit_instruction(Code.JOIN, point.thread, target=other)
                previous = worked_until
        gap = (min(previous, point.start), point.start)
        self._emit_instruction(Code.HOST, point.thread, host=max(point.start - previous, 0), gap=gap)

    def _is_silent(self, thread: int, begin: int, end: int) -> bool:
        """Whether the thread ran no op for most of this time."""
        starts, ends = self.linked.scope_spans.get(thread, (_NOTHING, _NOTHING))
        first, last = int(np.searchsorted(ends, begin)), int(np.searchsorted(starts, end))
        worked = np.minimum(ends[first:last], end) - np.maximum(starts[first:last], begin)
        return float(np.maximum(worked, 0).sum()) < 0.5 * (end - begin)

    def _add_launch(self, point: _Point) -> None:
        """A call and its kernels; a call that a full queue holds waits for the kernel that made room for it."""
        rows = self.linked.kernels_of.get(point.row, [])
        length = point.end - point.start
        released_by = int(self.queue.released_by[point.row])
        if not rows:
            self._emit_instruction(Code.HOST, point.thread, host=length)
        elif self._holds_host(point, rows):
            self._add_blocking_copy(point, rows[0])
        else:
            if released_by >= 0:
                self._emit_instruction(
                    Code.EVENT_SYNCHRONIZE, point.thread, target=self.event[released_by], row=point.row
                )
                length = min(point.end - int(self.linked.end[released_by]), self.queue.usual)
            for index, row in enumerate(rows):
                self._add_kernel(point.thread, row, host=0 if index else length)

    def _holds_host(self, point: _Point, rows: list[int]) -> bool:
        """Whether the call itself took part in its copy (pageable memory): it lasted for most of it."""
        if len(rows) != 1 or self.linked.events["kind"][rows[0]] != Kind.MEMCPY:
            return False
        start, length = int(self.linked.events["start"][rows[0]]), int(self.linked.events["duration"][rows[0]])
        return length > 0 and min(point.end, start + length) - start > 0.5 * length

    def _add_blocking_copy(self, point: _Point, row: int) -> None:
        """The host is held for as much of the copy as is inside the call."""
        start, end = int(self.linked.events["start"][row]), int(self.linked.end[row])
        stream, free = int(self.linked.stream[row]), int(self.late.free[row])
        before = 0 if free > point.start else max(start - point.start, 0)  # the host's own way to the copy
        self._add_kernel(point.thread, row, host=before, length=min(end, point.end) - start)
        self._emit_instruction(Code.STREAM_SYNCHRONIZE, point.thread, target=stream, row=point.row)
        if end > point.end:
            self._emit_instruction(Code.LAUNCH, point.thread, target=stream, kernel=end - point.end, row=row)
        self._emit_instruction(Code.HOST, point.thread, host=max(point.end - end, 0))

    def _add_kernel(self, thread: int, row: int, *, host: int, length: int | None = None) -> None:
        """Puts one kernel on its stream, behind the kernels it waited for elsewhere, and what came after it without a
        call of its own."""
        for sources in (self.linked.waited_for, self.late.behind, self.late.after):
            source = int(sources[row])
            if source >= 0:
                stream = int(self.linked.stream[row])
                self._emit_instruction(Code.STREAM_WAIT_EVENT, thread, target=stream, event=self.event[source])
        # a copy that its call takes part in begins when that comes to it, unless it stands in a queue
        kept = int(self.late.kept[row]) if length is None or not host else 0
        kernel = int(self.linked.events["duration"][row]) if length is None else length
        self._put_kernel(thread, row, host=host, kernel=kernel, kept=kept)
        for follower in self.followers.get(row, ()):
            duration, kept = int(self.linked.events["duration"][follower]), int(self.late.kept[follower])
            self._put_kernel(thread, follower, host=0, kernel=duration, kept=kept)

    def _add_synchronisation(self, point: _Point) -> None:
        """Holds the host for the stream that the call can have waited for; which one is not recorded.

        All that had been launched on it must have ended when the call returned; of several the last one counts.
        """
        ends = self.running.find_running(point.start)
        possible = {stream: end for stream, end in ends.items() if point.start < end <= point.end}
        if not possible:
            self._emit_instruction(Code.HOST, point.thread, host=point.end - point.start, row=point.row)
            return
        last = max(possible, key=lambda stream: (possible[stream], -stream))
        everything = "Device" in self.linked.get_name(point.row) and max(ends.values()) <= point.end
        code = Code.DEVICE_SYNCHRONIZE if everything else Code.STREAM_SYNCHRONIZE
        self._emit_instruction(code, point.thread, target=-1 if everything else last, row=point.row)
        self._emit_instruction(Code.HOST, point.thread, host=point.end - possible[last])

    def _finish_instructions(self) -> TimelineInstructions:
        if self.rows:
            self._gather_columns()
        columns = [np.concatenate(column) for column in zip(*self.blocks, strict=True)]
        code, thread, target, event, host, kernel, kept, row, point, gap_begin, gap_end = columns
        blank = np.full(len(code), -1, dtype=np.int32)
        schedule = Schedule(
            code=code, thread=thread, target=target, event=event, name=blank, part=blank, runtime=blank, call=blank,
            op=blank, scope=blank, num_threads=int(max(thread.max(), target[code == Code.JOIN].max(initial=0))) + 1,
            num_streams=int(self.linked.stream.max(initial=0)) + 1, num_events=len(self.event),
        )  # fmt: skip
        return TimelineInstructions(
            origin=self.begin,
            gap=_NS * self.late.gap,
            schedule=schedule,
            host_seconds=host,
            kernel_seconds=kernel,
            kept_seconds=kept,
            row=row,
            point=point,
            gap_begin=gap_begin,
            gap_end=gap_end,
        )


def _number_event_sources(linked: Linked, late: Lateness, queue: LaunchQueue) -> dict[int, int]:
    """The kernels whose end something waits for, numbered as events."""
    rows = np.concatenate([linked.waited_for, late.behind, late.after, queue.released_by])
    return {int(row): number for number, row in enumerate(np.unique(rows[rows >= 0]))}


def _find_kernels_without_call(linked: Linked) -> tuple[list[int], dict[int, list[int]]]:
    """Kernels whose launch is not in the trace: those launched before it began, and the others by the kernel that they
    follow."""
    rows = linked.device[linked.launch[linked.device] < 0]
    lost = linked.follows[rows] >= 0
    followers: dict[int, list[int]] = {}
    for row in rows[lost].tolist():
        followers.setdefault(int(linked.follows[row]), []).append(row)
    return rows[~lost].tolist(), followers
