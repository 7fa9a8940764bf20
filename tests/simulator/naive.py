"""The simulation by its definition: every moment is looked up from the moments it depends on, one at a time."""

from __future__ import annotations

from functools import cache

from tests.simulator.instructions import Instruction
from traincast.simulator.schedule import Code

Place = tuple[int, int]  # rank, instruction


class NaiveWalk:
    """Ranks as lists of instructions; `collectives` are (places, seconds)."""

    def __init__(
        self, ranks: list[list[Instruction]], collectives: list[tuple[list[Place], float]], gap: float = 0.0
    ) -> None:
        self.ranks, self.gap = ranks, gap
        self.collective_at = {place: collective for collective in collectives for place in collective[0]}
        self.host_issue = cache(self._host_issue)
        self.host_after = cache(self._host_after)
        self.kernel_start = cache(self._kernel_start)
        self.kernel_end = cache(self._kernel_end)

    def _thread(self, rank: int, thread: int, i: int) -> float:
        before = [j for j in range(i) if self.ranks[rank][j].thread == thread]
        return self.host_after(rank, before[-1]) if before else 0.0

    def _stream(self, rank: int, stream: int, i: int) -> float:
        for j in reversed(range(i)):
            other = self.ranks[rank][j]
            if other.target == stream and other.code is Code.LAUNCH:
                return self.kernel_end(rank, j)
            if other.target == stream and other.code is Code.STREAM_WAIT_EVENT:
                return max(self._stream(rank, stream, j), self._event(rank, other.event, j))
        return -self.gap

    def _event(self, rank: int, event: int, i: int) -> float:
        for j in reversed(range(i)):
            other = self.ranks[rank][j]
            if other.event == event and other.code is Code.EVENT_RECORD:
                return max(self.host_after(rank, j), self._stream(rank, other.target, j))
        return 0.0

    def _host_issue(self, rank: int, i: int) -> float:
        own = self.ranks[rank][i]
        return self._thread(rank, own.thread, i) + own.host

    def _host_after(self, rank: int, i: int) -> float:
        own, now = self.ranks[rank][i], self.host_issue(rank, i)
        if own.code is Code.JOIN:
            return max(now, self._thread(rank, own.target, i))
        if own.code is Code.STREAM_SYNCHRONIZE:
            return max(now, self._stream(rank, own.target, i))
        if own.code is Code.DEVICE_SYNCHRONIZE:
            streams = {other.target for other in self.ranks[rank] if other.code is Code.LAUNCH}
            return max([now, *(self._stream(rank, stream, i) for stream in streams)])
        if own.code is Code.EVENT_SYNCHRONIZE:
            return max(now, self._event(rank, own.target, i))
        return now

    def _kernel_start(self, rank: int, i: int) -> float:
        own = self.ranks[rank][i]
        return max(self.host_after(rank, i), self._stream(rank, own.target, i) + self.gap)

    def _kernel_end(self, rank: int, i: int) -> float:
        if (rank, i) in self.collective_at:
            places, seconds = self.collective_at[rank, i]
            return max(self.kernel_start(*place) for place in places) + seconds
        return self.kernel_start(rank, i) + self.ranks[rank][i].kernel
