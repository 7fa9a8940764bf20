"""The walk: host threads and device streams, each with a clock, over the instructions of one rank.

A kernel starts at the latest of: its launch call having returned, its stream being free, and the events its
stream waits on. A synchronising instruction holds its host thread until the device has caught up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from traincast.kernels.call import FloatArray
from traincast.simulate.schedule import Code, Schedule


@dataclass(slots=True)
class Clocks:
    """Where every host thread, stream and event stands, in seconds."""

    threads: list[float]
    streams: list[float]
    events: list[float] = field(default_factory=list)

    @staticmethod
    def at_zero(schedule: Schedule, gap: float = 0.0) -> Clocks:
        """Everything idle at time 0: streams ended their last kernel a `gap` ago."""
        return Clocks([0.0] * schedule.num_threads, [-gap] * schedule.num_streams, [0.0] * schedule.num_events)

    @property
    def latest(self) -> float:
        """When everything issued so far is done."""
        return max(*self.threads, *self.streams)


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """What one walk did: host time after every instruction, and start and end of every launch, in seconds.

    `host_issue` is the host time of an instruction before any waiting, so `host_after - host_issue` is the time
    it was held by a synchronisation.
    """

    host_issue: FloatArray
    host_after: FloatArray
    kernel_start: FloatArray
    kernel_end: FloatArray


def walk(
    schedule: Schedule, host_seconds: FloatArray, kernel_seconds: FloatArray, clocks: Clocks, *, gap: float = 0.0
) -> Trace:
    """Executes the instructions, moving `clocks` on. `host_seconds` is per instruction, `kernel_seconds` per
    instruction too (used by launches); `gap` is the time in seconds between kernels queued in one stream."""
    threads, streams, events = clocks.threads, clocks.streams, clocks.events
    issue: list[float] = []
    after: list[float] = []
    starts: list[float] = []
    ends: list[float] = []
    HOST, LAUNCH = int(Code.HOST), int(Code.LAUNCH)
    columns = zip(
        schedule.code.tolist(),
        schedule.thread.tolist(),
        schedule.target.tolist(),
        schedule.event.tolist(),
        host_seconds.tolist(),
        kernel_seconds.tolist(),
        strict=True,
    )
    for code, thread, target, event, host, kernel in columns:
        now = threads[thread] + host
        issue.append(now)
        if code == LAUNCH:
            free = streams[target] + gap
            start = now if now > free else free
            end = start + kernel
            streams[target] = end
            starts.append(start)
            ends.append(end)
        elif code != HOST:
            now = _control(code, now, target, event, threads, streams, events)
        threads[thread] = now
        after.append(now)
    return Trace(np.array(issue), np.array(after), np.array(starts), np.array(ends))


def _control(
    code: int,
    now: float,
    target: int,
    event: int,
    threads: list[float],
    streams: list[float],
    events: list[float],
) -> float:
    """Carries out a synchronisation; returns the host time after it."""
    if code == Code.JOIN:
        return max(now, threads[target])
    if code == Code.STREAM_SYNCHRONIZE:
        return max(now, streams[target])
    if code == Code.DEVICE_SYNCHRONIZE:
        return max(now, *streams)
    if code == Code.EVENT_SYNCHRONIZE:
        return max(now, events[target])
    if code == Code.EVENT_RECORD:
        events[event] = max(now, streams[target])
    elif code == Code.STREAM_WAIT_EVENT:
        streams[target] = max(streams[target], events[event])
    return now
