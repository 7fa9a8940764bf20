"""Exact least-recently-used caches of every size at once, from the order in which rows were accessed.

A lookup hits a cache of C rows when fewer than C other rows were accessed since its row was last accessed. That number,
its stack distance, is the time since then less the repeats inside it, and counting those is counting inversions.
"""

from __future__ import annotations

import numpy as np

from traincast.utils.arrays import BoolArray, Int32Array, IntArray
from traincast.utils.errors import TraincastError

FIRST_TOUCH = -1
DEFAULT_LARGEST = 1 << 20  # rows of the largest cache that is counted; memory grows with it
MAX_INDEX = (1 << 34) - 1  # leaves room for positions in a 64-bit sort key
MAX_PIECE = (1 << 26) - 1
"""Lookups counted at once; sorting this many takes about 3 GB."""
_PIECE = 1 << 21  # lookups counted at once: of 2^23, in a third of the time that one sort of all takes
_BLOCK_BITS = 18  # numbers sorted at a time, so that they stay in the CPU's cache


def stack_distances(indices: IntArray) -> IntArray:
    """Different other rows accessed since the same row was last accessed; -1 where it never was. O(n log n).

    Row numbers are between 0 and `MAX_INDEX`; there are at most `MAX_PIECE` of them.
    """
    previous, _ = _find_neighbours(indices)
    return _compute_reuse_distances(previous)


def _find_neighbours(indices: IntArray) -> tuple[IntArray, BoolArray]:
    """For every lookup: where its row was accessed before (-1 if nowhere), and whether this was the last time."""
    bits = len(indices).bit_length()
    keys = (indices << bits) | np.arange(len(indices))  # row, then time: a plain sort is far faster than a stable one
    keys.sort()
    ordered, order = keys >> bits, keys & ((1 << bits) - 1)
    same = ordered[1:] == ordered[:-1]
    previous = np.full(len(indices), FIRST_TOUCH, dtype=np.int64)
    previous[order[1:][same]] = order[:-1][same]
    last = np.ones(len(indices), dtype=np.bool_)
    last[order[:-1][same]] = False
    return previous, last


def _compute_reuse_distances(previous: IntArray) -> IntArray:
    repeats = np.flatnonzero(previous >= 0)
    before = previous[repeats]
    rank = np.zeros(len(previous), dtype=np.int32)
    rank[before] = 1
    rank = np.cumsum(rank, dtype=np.int32) - np.int32(1)
    distances = np.full(len(previous), FIRST_TOUCH, dtype=np.int64)
    distances[repeats] = repeats - before - 1 - count_earlier_and_greater(rank[before])
    return distances


def count_earlier_and_greater(permutation: Int32Array) -> IntArray:
    """For each element of a permutation of 0..n-1: how many before it are greater.

    From the highest bit down, elements that agree so far stand together in their first order; one whose next bit is 0
    is preceded there by greater ones exactly where that bit is 1.
    """
    count = len(permutation)
    values, greater = permutation.copy(), np.zeros(count, dtype=np.int32)
    bits = max(count - 1, 0).bit_length()
    inner = min(bits, _BLOCK_BITS)
    values, greater = _sort_by_bits(values, greater, range(inner, bits))
    for first in range(0, count, 1 << inner):  # what agrees in the high bits fits the processor's cache
        block = slice(first, first + (1 << inner))
        _, greater[block] = _sort_by_bits(values[block] - np.int32(first), greater[block], range(inner))
    return greater.astype(np.int64)[permutation]


def _sort_by_bits(values: Int32Array, greater: Int32Array, bits: range) -> tuple[Int32Array, Int32Array]:
    """Values sorted by these bits, those above being sorted already, with the greater ones that each has met."""
    place = np.arange(len(values), dtype=np.int32)
    for bit in reversed(bits):
        ones = (values >> bit) & 1
        start = (values >> (bit + 1)) << (bit + 1)
        before = np.cumsum(ones, dtype=np.int32) - ones
        before -= before[start]
        greater = greater + before * (1 - ones)
        target = np.where(ones > 0, start + np.int32(1 << bit) + before, place - before)
        values, greater = _scatter_values(values, target), _scatter_values(greater, target)
    return values, greater


def _scatter_values(values: Int32Array, target: Int32Array) -> Int32Array:
    moved = np.empty_like(values)
    moved[target] = values
    return moved


class LruCounter:
    """Hits of every LRU cache of up to `largest` rows over a stream fed in pieces.

    Memory is bounded by the largest piece and `largest`: between pieces only the most recent rows are kept, and small
    pieces wait for each other, since each count sorts those rows again.
    """

    def __init__(self, largest: int = DEFAULT_LARGEST) -> None:
        if not 1 <= largest <= MAX_PIECE:
            raise TraincastError(f"largest cache of {largest} rows; give 1 to {MAX_PIECE}")
        self.largest = largest
        self.lookups = 0
        self._at_distance = np.zeros(largest, dtype=np.int64)
        self._recent = np.empty(0, dtype=np.int64)  # distinct rows, the most recent last
        self._waiting: list[IntArray] = []
        self._counted = 0  # lookups that do not wait

    def add_lookups(self, indices: IntArray) -> None:
        """Takes the next lookups of the stream."""
        block = max(_PIECE, self.largest)
        for first in range(0, len(indices), block):
            self._waiting.append(indices[first : first + block])
            self.lookups += len(self._waiting[-1])
            if self.lookups - self._counted >= self.largest:
                self._count_hits()

    def _count_hits(self) -> None:
        stream = np.concatenate([self._recent, *self._waiting])
        previous, last = _find_neighbours(stream)
        distances = _compute_reuse_distances(previous)[len(self._recent) :]
        within = distances[(distances >= 0) & (distances < self.largest)]
        self._at_distance += np.bincount(within, minlength=self.largest)
        self._recent = stream[last][-self.largest :]
        self._waiting, self._counted = [], self.lookups

    def count_hits(self, cache_rows: int) -> int:
        """Lookups so far that hit a cache of this many rows."""
        if cache_rows > self.largest:
            raise TraincastError(f"a cache of {cache_rows} rows; those of up to {self.largest} were counted")
        if self._waiting:
            self._count_hits()
        return int(self._at_distance[:cache_rows].sum())

    def compute_hit_rate(self, cache_rows: int) -> float:
        """Share of the lookups so far that hit a cache of this many rows."""
        return self.count_hits(cache_rows) / self.lookups if self.lookups else 0.0
