"""A measured timeline as instructions for the walk.

Host segments, launch calls and kernels keep their measured lengths. What is simulated is everything that waits:
kernels for their stream, streams for each other, the host for the device, threads for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from traincast.arrays import FloatArray, IntArray
from traincast.traces.events import Kind
from traincast.traces.intervals import Intervals
from traincast.traces.link import Linked
from traincast.walk.schedule import Code, Schedule

_NS = 1e-9  # seconds: traces count in nanoseconds, the walk in seconds
STEP_EDGE = -2
"""The `row` of an instruction that stands for the start or end of a step."""

_NOTHING = np.empty(0, dtype=np.int64)
# a launched kernel starts within a few microseconds; one that waited longer than this on a full device was crowded out
_CROWDED_NS, _CROWDED_SHARE = 10_000, 0.9
JOIN_NS = 20_000
"""A thread silent for longer than this (nanoseconds) while another works is taken to wait for it: an op that launches
nothing takes less."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TimelineInstructions:
    """Instructions with their measured times in seconds; `row` is the event behind each, -1, or -2 at a step's edge.

    `point` is the runtime call that an instruction belongs to or leads to (-1 for a step's edge). An instruction that
    is the host's way to that call has `gap_begin` and `gap_end`, nanoseconds on the trace's clock; others have -1.
    `origin` is the moment at which the walk begins, on the same clock.
    """

    origin: int
    schedule: Schedule
    host_seconds: FloatArray
    kernel_seconds: FloatArray
    row: IntArray
    point: IntArray
    gap_begin: IntArray
    gap_end: IntArray


@dataclass(frozen=True, slots=True)
class _Point:
    """Something a host thread does at one moment: a call, or the start or end of a step."""

    start: int
    end: int
    thread: int
    row: int


def timeline_instructions(linked: Linked) -> TimelineInstructions:
    """The timeline as instructions, with all times as measured."""
    return _Builder(linked).build(_points(linked))


def _points(linked: Linked) -> list[_Point]:
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
        # code thread target event host kernel row point gap_begin gap_end
        self.rows: list[tuple[int, int, int, int, float, float, int, int, int, int]] = []
        self.point = -1
        self.last: dict[int, int] = {}  # thread -> end of its last point
        self.ended = _Ended()
        streams = np.unique(linked.events["stream"][linked.device])
        self.stream = {int(stream): number for number, stream in enumerate(streams)}
        sources = np.unique(linked.waited_for[linked.waited_for >= 0])
        self.event = {int(row): number for number, row in enumerate(sources)}
        self.busy_device = Intervals.union(linked.events["start"][linked.device], linked.end[linked.device])
        self.free = _stream_free(linked)
        self.queue = _Queue(linked)
        self.begin = 0

    def build(self, points: list[_Point]) -> TimelineInstructions:
        self.begin = points[0].start
        self._backlog(points[0].start)
        for point in points:
            self.point = point.row
            self._gap(point)
            if point.row < 0:
                self._emit(Code.HOST, point.thread, row=STEP_EDGE)
            elif self.linked.is_synchronise[point.row]:
                self._synchronise(point)
            else:
                self._launch(point)
            self.last[point.thread] = point.end
            self.ended.put(point.thread, point.end)
        return self._finish()

    def _emit(
        self,
        code: Code,
        thread: int,
        *,
        target: int = -1,
        event: int = -1,
        host: int = 0,
        kernel: int = 0,
        row: int = -1,
        gap: tuple[int, int] = (-1, -1),
    ) -> None:
        self.rows.append((code, thread, target, event, _NS * host, _NS * kernel, row, self.point, *gap))

    def _backlog(self, start: int) -> None:
        """Work from before the trace: each stream is busy until the last of it had ended, as measured."""
        before = self.linked.device[self.linked.launch[self.linked.device] < 0]
        last = {
            int(self.linked.events["stream"][row]): row for row in before[np.argsort(self.linked.end[before])].tolist()
        }
        for stream, row in last.items():
            busy = int(self.linked.end[row]) - start
            if busy > 0:
                self._emit(Code.LAUNCH, 0, target=self.stream[stream], kernel=busy, row=row)

    def _gap(self, point: _Point) -> None:
        """Host time since the thread's last point; after a silence, it waited for the thread that worked last."""
        previous = self.last.get(point.thread, self.begin)
        if point.start - previous > JOIN_NS:
            other, worked_until = self.ended.latest(point.start, without=point.thread)
            if other >= 0 and worked_until > previous and self._silent(point.thread, previous, point.start):
                self._emit(Code.JOIN, point.thread, target=other)
                previous = worked_until
        gap = (min(previous, point.start), point.start)
        self._emit(Code.HOST, point.thread, host=max(point.start - previous, 0), gap=gap)

    def _silent(self, thread: int, begin: int, end: int) -> bool:
        """Whether the thread ran no op for most of this time."""
        starts, ends = self.linked.scope_spans.get(thread, (_NOTHING, _NOTHING))
        first, last = int(np.searchsorted(ends, begin)), int(np.searchsorted(starts, end))
        worked = np.minimum(ends[first:last], end) - np.maximum(starts[first:last], begin)
        return float(np.maximum(worked, 0).sum()) < 0.5 * (end - begin)

    def _launch(self, point: _Point) -> None:
        """A call and its kernels."""
        rows = self.linked.kernels_of.get(point.row, [])
        length = point.end - point.start
        if not rows:
            self._emit(Code.HOST, point.thread, host=length)
        elif self._holds_host(point, rows):
            self._blocking_copy(point, rows[0])
        else:
            for index, row in enumerate(rows):
                self._kernel(point.thread, row, host=0 if index else length)

    def _holds_host(self, point: _Point, rows: list[int]) -> bool:
        """Whether the call itself took part in its copy (pageable memory): it lasted for most of it."""
        if len(rows) != 1 or self.linked.events["kind"][rows[0]] != Kind.MEMCPY:
            return False
        start, length = int(self.linked.events["start"][rows[0]]), int(self.linked.events["duration"][rows[0]])
        return length > 0 and min(point.end, start + length) - start > 0.5 * length

    def _blocking_copy(self, point: _Point, row: int) -> None:
        """The host is held for as much of the copy as lies inside the call."""
        start, end = int(self.linked.events["start"][row]), int(self.linked.end[row])
        stream = self.stream[int(self.linked.events["stream"][row])]
        free = self.free[row]
        inside = min(end, point.end) - start
        self._kernel(point.thread, row, host=max(start - max(point.start, free), 0), length=inside)
        self._emit(Code.STREAM_SYNCHRONIZE, point.thread, target=stream, row=point.row)
        if end > point.end:
            self._emit(Code.LAUNCH, point.thread, target=stream, kernel=end - point.end, row=row)
        self._emit(Code.HOST, point.thread, host=max(point.end - end, 0))

    def _crowded_out(self, row: int) -> int:
        """How long a kernel that could have started waited while other streams filled the device, nanoseconds."""
        start, waited = int(self.linked.events["start"][row]), int(self.linked.waited_for[row])
        ready = max(int(self.linked.end[self.linked.launch[row]]), self.free[row])
        ready = max(ready, int(self.linked.end[waited])) if waited >= 0 else ready
        if start - ready < _CROWDED_NS:
            return 0
        covered = self.busy_device.clip(ready, start).total
        return start - ready if covered > _CROWDED_SHARE * (start - ready) else 0

    def _kernel(self, thread: int, row: int, *, host: int, length: int | None = None) -> None:
        """Puts one kernel on its stream, behind the kernel it waited for elsewhere."""
        stream = self.stream[int(self.linked.events["stream"][row])]
        if self.linked.waited_for[row] >= 0:
            event = self.event[int(self.linked.waited_for[row])]
            self._emit(Code.STREAM_WAIT_EVENT, thread, target=stream, event=event)
        kernel = (int(self.linked.events["duration"][row]) if length is None else length) + self._crowded_out(row)
        self._emit(Code.LAUNCH, thread, target=stream, host=host, kernel=kernel, row=row)
        if row in self.event:
            self._emit(Code.EVENT_RECORD, thread, target=stream, event=self.event[row])

    def _synchronise(self, point: _Point) -> None:
        """Holds the host for the stream that the call can have waited for; which one is not recorded.

        All that had been launched on it must have ended when the call returned; of several the last one counts.
        """
        ends = self.queue.running(point.start)
        possible = {stream: end for stream, end in ends.items() if point.start < end <= point.end}
        if not possible:
            self._emit(Code.HOST, point.thread, host=point.end - point.start, row=point.row)
            return
        last = max(possible, key=lambda stream: (possible[stream], -stream))
        everything = "Device" in self.linked.name(point.row) and max(ends.values()) <= point.end
        code = Code.DEVICE_SYNCHRONIZE if everything else Code.STREAM_SYNCHRONIZE
        self._emit(code, point.thread, target=-1 if everything else self.stream[last], row=point.row)
        self._emit(Code.HOST, point.thread, host=point.end - possible[last])

    def _finish(self) -> TimelineInstructions:
        columns = list(zip(*self.rows, strict=True))
        code, thread, target, event = (np.array(column, dtype=np.int32) for column in columns[:4])
        blank = np.full(len(code), -1, dtype=np.int32)
        schedule = Schedule(
            code=code, thread=thread, target=target, event=event, name=blank, part=blank, runtime=blank, call=blank,
            op=blank, scope=blank, num_threads=int(max(thread.max(), target[code == Code.JOIN].max(initial=0))) + 1,
            num_streams=max(len(self.stream), 1), num_events=len(self.event),
        )  # fmt: skip
        return TimelineInstructions(
            origin=self.begin,
            schedule=schedule,
            host_seconds=np.array(columns[4]),
            kernel_seconds=np.array(columns[5]),
            row=np.array(columns[6], dtype=np.int64),
            point=np.array(columns[7], dtype=np.int64),
            gap_begin=np.array(columns[8], dtype=np.int64),
            gap_end=np.array(columns[9], dtype=np.int64),
        )


def _stream_free(linked: Linked) -> dict[int, int]:
    """For every kernel the end of the one before it on its stream."""
    last: dict[int, int] = {}
    free = {}
    streams = linked.events["stream"][linked.device].tolist()
    for row, stream, end in zip(linked.device.tolist(), streams, linked.end[linked.device].tolist(), strict=True):
        free[row] = last.get(stream, 0)
        last[stream] = end
    return free


class _Queue:
    """What had been launched on every stream, asked for moments that do not go back."""

    def __init__(self, linked: Linked) -> None:
        launched = linked.device[linked.launch[linked.device] >= 0]
        issued = linked.events["start"][linked.launch[launched]]
        order = np.argsort(issued, kind="stable")
        self._issued, self._end = issued[order].tolist(), linked.end[launched][order].tolist()
        self._stream = linked.events["stream"][launched][order].tolist()
        self._next = 0
        self._until: dict[int, int] = {}  # stream -> when all that was launched on it had ended

    def running(self, moment: int) -> dict[int, int]:
        """The streams with work launched before this moment that had not ended by then, and when all of it had."""
        while self._next < len(self._issued) and self._issued[self._next] < moment:
            stream, end = self._stream[self._next], self._end[self._next]
            self._until[stream] = max(end, self._until.get(stream, end))
            self._next += 1
        self._until = {stream: end for stream, end in self._until.items() if end > moment}
        return self._until


class _Ended:
    """When every thread's last point ended, asked for moments that do not go back."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._number: dict[int, int] = {}  # thread -> place in the order of first points
        self._going: list[tuple[int, int]] = []  # heap of (end, thread) that may still lie ahead
        self._ended: list[tuple[int, int, int]] = []  # heap of (-end, number, thread), the latest first

    def put(self, thread: int, end: int) -> None:
        """A further point of a thread."""
        self._last[thread] = end
        self._number.setdefault(thread, len(self._number))
        heappush(self._going, (end, thread))

    def latest(self, moment: int, *, without: int) -> tuple[int, int]:
        """The other thread whose last point ended latest by this moment, and when; (-1, 0) for none."""
        while self._going and self._going[0][0] <= moment:
            end, thread = heappop(self._going)
            heappush(self._ended, (-end, self._number[thread], thread))
        aside, answer = None, (-1, 0)
        while self._ended:
            entry = self._ended[0]
            if self._last[entry[2]] == -entry[0]:
                if entry[2] != without:
                    answer = (entry[2], -entry[0])
                    break
                aside = entry
            heappop(self._ended)
        if aside is not None:
            heappush(self._ended, aside)
        return answer
