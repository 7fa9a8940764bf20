"""The critical path of a step: the chain of host work, kernels and waits that its length is made of.

The walk only ever takes maxima and adds durations, so what held an event back is found afterwards: it is whatever
ended exactly when the event began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from traincast.simulate.schedule import Code, Schedule
from traincast.simulate.timeline import Timeline
from traincast.simulate.walk import Trace
from traincast.workload.program import Int32Array


class Walked(Protocol):
    """Instructions and what a walk made of them; see `Timeline`."""

    @property
    def schedule(self) -> Schedule:
        """The instructions."""

    @property
    def trace(self) -> Trace:
        """When each was done."""

    @property
    def launches(self) -> Int32Array:
        """Which of them are launches."""

    @property
    def origin(self) -> float:
        """When the walk began, seconds."""

    @property
    def gap(self) -> float:
        """Seconds between two queued kernels."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the critical path, seconds on the walk's clock.

    `where` is "host" or "device"; `instruction` indexes the schedule (for the device: its launch).
    """

    where: str
    instruction: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the stretch."""
        return self.end - self.start


def critical_path(timeline: Walked) -> list[Segment]:
    """The segments from the start of the step to its end, in order; adjacent ones touch."""
    return list(reversed(_Backtrace(timeline).segments()))


class _Backtrace:
    def __init__(self, timeline: Walked) -> None:
        self.timeline = timeline
        schedule, trace = timeline.schedule, timeline.trace
        self.launches = timeline.launches
        self.thread = schedule.thread
        self.ends: dict[float, list[int]] = {}  # kernels by the moment they end ...
        self.ready: dict[float, list[int]] = {}  # ... and by the moment the next one in their stream may start
        for k, end in enumerate(trace.kernel_end.tolist()):
            self.ends.setdefault(end, []).append(k)
            self.ready.setdefault(end + timeline.gap, []).append(k)
        self.previous = self._previous_on_thread()

    def _previous_on_thread(self) -> list[int]:
        last: dict[int, int] = {}
        previous = []
        for i, thread in enumerate(self.thread.tolist()):
            previous.append(last.get(thread, -1))
            last[thread] = i
        return previous

    def segments(self) -> list[Segment]:
        trace = self.timeline.trace
        if not len(trace.host_after):
            return []
        latest_kernel = float(trace.kernel_end.max(initial=-np.inf))
        latest_host = float(trace.host_after.max())
        if latest_kernel > latest_host:
            return self._follow("device", int(np.argmax(trace.kernel_end)))
        return self._follow("host", int(np.argmax(trace.host_after)))

    def _follow(self, where: str, index: int) -> list[Segment]:
        found: list[Segment] = []
        while index >= 0:
            where, index = self._step_device(index, found) if where == "device" else self._step_host(index, found)
        return found

    def _step_device(self, k: int, found: list[Segment]) -> tuple[str, int]:
        """A kernel began when its launch returned, when the one before it was done, or when an event let it."""
        trace = self.timeline.trace
        start, end, instruction = float(trace.kernel_start[k]), float(trace.kernel_end[k]), int(self.launches[k])
        if start == trace.host_issue[instruction]:
            found.append(Segment("device", instruction, start, end))
            return "host", instruction
        blocker = max((other for other in self.ready.get(start, ()) if other < k), default=-1)
        if blocker >= 0:  # the gap between the two belongs to this one
            found.append(Segment("device", instruction, float(trace.kernel_end[blocker]), end))
            return "device", blocker
        before = self._host_ready_at(start, before=instruction)
        begin = float(trace.host_after[before]) if before >= 0 else start
        found.append(Segment("device", instruction, begin, end))
        return "host", before

    def _step_host(self, i: int, found: list[Segment]) -> tuple[str, int]:
        trace = self.timeline.trace
        issue, after = float(trace.host_issue[i]), float(trace.host_after[i])
        if after > issue:  # held by a synchronisation
            blocker = self._kernel_ending_at(after, before=len(self.launches))
            if blocker >= 0:
                return "device", blocker
            return "host", self._host_at(after, before=i)
        before = self.previous[i]
        start = float(trace.host_after[before]) if before >= 0 else self.timeline.origin
        if issue > start:
            found.append(Segment("host", i, start, issue))
        return "host", before

    def _kernel_ending_at(self, moment: float, *, before: int) -> int:
        return max((k for k in self.ends.get(moment, ()) if k < before), default=-1)

    def _host_ready_at(self, moment: float, *, before: int) -> int:
        """The instruction that recorded the event which a stream, gap included, waited for."""
        matches = np.flatnonzero(self.timeline.trace.host_after[:before] + self.timeline.gap == moment)
        return int(matches[-1]) if len(matches) else -1

    def _host_at(self, moment: float, *, before: int) -> int:
        matches = np.flatnonzero(self.timeline.trace.host_after[:before] == moment)
        return int(matches[-1]) if len(matches) else -1


def critical_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds of the critical path by what it is spent on: "host", or the kernel family."""
    totals: dict[str, float] = {}
    for segment in critical_path(timeline):
        instruction = segment.instruction
        if timeline.schedule.code[instruction] == Code.LAUNCH and segment.where == "device":
            key = timeline.calls[timeline.schedule.call[instruction]].family.name
        else:
            key = "host"
        totals[key] = totals.get(key, 0.0) + segment.seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
