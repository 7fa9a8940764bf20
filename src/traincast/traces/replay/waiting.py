"""What can hold a host thread at a moment: streams with work left, and threads that worked until then."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from traincast.traces.link import Linked


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
