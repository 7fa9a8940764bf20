"""Where a rank stands during a simulation, and what a simulation found."""

from __future__ import annotations

from dataclasses import dataclass, field

from traincast.simulator.schedule import Schedule
from traincast.utils.arrays import FloatArray


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
class RankTimes:
    """What one simulation did: host time after every instruction, and start and end of every launch, in seconds.

    `host_issue` is the host time of an instruction before any waiting, so `host_after - host_issue` is the time
    it was held by a synchronisation.
    """

    host_issue: FloatArray
    host_after: FloatArray
    kernel_start: FloatArray
    kernel_end: FloatArray
