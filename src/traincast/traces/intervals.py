"""Sets of time intervals as sorted, disjoint arrays of starts and ends (nanoseconds)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.utils.arrays import IntArray


@dataclass(frozen=True, eq=False, slots=True)
class Intervals:
    """Disjoint intervals in order."""

    start: IntArray
    end: IntArray

    @staticmethod
    def from_spans(start: IntArray, end: IntArray) -> Intervals:
        """What at least one of the given intervals covers."""
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        if not len(start):
            return Intervals(start, end)
        reached = np.maximum.accumulate(end)
        first = np.flatnonzero(np.concatenate(([True], start[1:] > reached[:-1])))
        last = np.concatenate((first[1:] - 1, [len(start) - 1]))
        return Intervals(start[first], reached[last])

    @property
    def total(self) -> int:
        """Nanoseconds covered."""
        return int((self.end - self.start).sum())

    def clip_to(self, start: int, end: int) -> Intervals:
        """The part inside a window."""
        inside = slice(np.searchsorted(self.end, start, side="right"), np.searchsorted(self.start, end, side="left"))
        return Intervals(np.maximum(self.start[inside], start), np.minimum(self.end[inside], end))

    def compute_covered(self, start: IntArray, end: IntArray) -> IntArray:
        """Nanoseconds covered inside each of these windows."""
        before = np.concatenate(([0], np.cumsum(self.end - self.start)))
        ends = np.append(self.end, 0)  # the last one is for moments before all intervals

        def until(moment: IntArray) -> IntArray:
            begun = np.searchsorted(self.start, moment, side="right")
            return np.asarray(before[begun] - np.where(begun > 0, np.maximum(ends[begun - 1] - moment, 0), 0))

        return until(end) - until(start)

    def find_gaps(self, start: int, end: int) -> Intervals:
        """What is not covered inside a window."""
        within = self.clip_to(start, end)
        starts, ends = np.append(start, within.end), np.append(within.start, end)
        real = ends > starts
        return Intervals(starts[real], ends[real])

    def subtract_length(self, other: Intervals) -> int:
        """Nanoseconds covered here and not there."""
        both = Intervals.from_spans(np.append(self.start, other.start), np.append(self.end, other.end))
        return both.total - other.total
