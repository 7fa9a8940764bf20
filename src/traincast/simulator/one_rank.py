"""The simulation: host threads and device streams, each with a clock, over the instructions of one rank.

A kernel starts at the latest of: its launch call having returned, its stream being free, and the events its
stream waits on. A synchronising instruction holds its host thread until the device has caught up. One rank is the
simplest case of `simulate_ranks`.
"""

from __future__ import annotations

from traincast.simulator.clocks import Clocks, RankTimes
from traincast.simulator.many_ranks import Collectives, RankGroup, simulate_ranks
from traincast.simulator.schedule import Schedule
from traincast.utils.arrays import FloatArray

__all__ = ["Clocks", "RankTimes", "simulate_rank"]


def simulate_rank(
    schedule: Schedule, host_seconds: FloatArray, kernel_seconds: FloatArray, clocks: Clocks, *, gap: float = 0.0
) -> RankTimes:
    """Executes the instructions, moving `clocks` on. `host_seconds` is per instruction, `kernel_seconds` per
    instruction too (used by launches); `gap` is the time in seconds between kernels queued in one stream."""
    group = RankGroup(schedule, host_seconds[None, :], kernel_seconds[None, :])
    (simulated,) = simulate_ranks([group], Collectives.none(), gap=gap, clocks=[[clocks]])
    (after,) = simulated.clocks()
    clocks.threads, clocks.streams, clocks.events = after.threads, after.streams, after.events
    return simulated.times(0)
