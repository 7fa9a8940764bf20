"""Raw indices batch by batch, and the access distributions and exact LRU hit rates measured from them in one pass.

A lookup hits a cache of C rows when fewer than C other rows were accessed since its row was last accessed. That number,
its stack distance, is the time since then less the repeats inside it, and counting those is counting inversions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.models.embeddings.access import Reuse
from traincast.models.embeddings.reuse import NUM_BINS, ReuseHistogram, sum_by_bin
from traincast.models.embeddings.table import MAX_POOLING, Pooling
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


_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, slots=True)
class Bags:
    """One batch of one table: `lengths` of its samples and their `indices`, sample after sample."""

    indices: IntArray
    lengths: IntArray


def check_lengths(lengths: IntArray, count: int, label: str = "lengths") -> None:
    """Rejects lengths below 0, and those that do not sum to the number of indices."""
    if len(lengths) and int(lengths.min()) < 0:
        raise TraincastError(f"{label}: {int(lengths.min())}; a sample makes 0 lookups or more")
    total = sum_safely(lengths)
    if total != count:
        raise TraincastError(f"{label} sum to {total} for {count} indices; they must agree")


def sum_safely(lengths: IntArray) -> int:
    """The sum of numbers at or above 0, whatever their type could hold."""
    if len(lengths) and int(lengths.max()) > _LARGEST // len(lengths):
        return sum(int(length) for length in lengths)
    return int(lengths.sum(dtype=np.int64))


def compute_lengths(offsets: IntArray, count: int, label: str = "offsets") -> IntArray:
    """Lengths from where every sample begins; the end of the last may be there or not."""
    if not len(offsets):
        return np.zeros(0, dtype=np.int64)
    if int(offsets[0]) != 0:
        raise TraincastError(f"{label} begin with {int(offsets[0])}; the first sample begins at 0")
    falling = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falling):
        place = int(falling[0])
        raise TraincastError(f"{label} fall from {int(offsets[place])} to {int(offsets[place + 1])}; they may not")
    if int(offsets[-1]) > count:
        raise TraincastError(f"{label} reach {int(offsets[-1])} for {count} indices; they must agree")
    starts = convert_to_int64(offsets, label)
    return np.diff(starts if starts[-1] == count else np.append(starts, count))


def choose_batch_size(batch_size: int | None, samples: int) -> int:
    """Samples of one batch; all of them where no size was given."""
    if batch_size is None:
        return max(samples, 1)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise TraincastError(f"batch_size {batch_size!r}; give an integer from 1")
    return int(batch_size)


def convert_to_int64(values: npt.NDArray[Any], label: str) -> IntArray:
    """The numbers as int64."""
    if values.dtype.kind == "u" and len(values) and int(values.max()) > _LARGEST:
        raise TraincastError(f"{label}: {int(values.max())} is too large for a row number")
    return values.astype(np.int64)


def check_integers(label: str, dtype: np.dtype[Any]) -> None:
    """Rejects what is not a type of integers."""
    if dtype.kind not in "iu":
        raise TraincastError(f"{label}: {dtype} numbers; give integers")


@dataclass(frozen=True, eq=False, slots=True)
class MeasuredAccess:
    """What batches of one table showed. `lookups` and `unique_rows` are means over batches, exact counts.

    `lru` has the exact hits of caches kept from batch to batch, `largest_index` the highest row number accessed.
    """

    batches: int
    lookups: float
    unique_rows: float
    access: Reuse
    pooling: Pooling
    lru: LruCounter
    largest_index: int

    @property
    def duplicates(self) -> float:
        """Lookups of a batch, on average, whose row the batch had accessed before."""
        return self.lookups - self.unique_rows


def measure_access(
    batches: Iterable[Bags], *, rows: int | None = None, largest_cache: int = DEFAULT_LARGEST
) -> MeasuredAccess:
    """Counts batches as they come. `rows` is the number of rows of the table where known, `largest_cache` in rows."""
    if rows is not None and rows < 1:
        raise TraincastError(f"rows {rows}; a table has 1 or more")
    lru, lengths = LruCounter(largest_cache), np.zeros(0, dtype=np.int64)
    in_bin, from_bin = np.zeros(NUM_BINS), np.zeros(NUM_BINS)
    number, largest = 0, -1
    for bags in batches:
        number += 1
        lengths = _add_lengths(lengths, bags.lengths)
        if not len(bags.indices):
            continue
        _check_indices(bags.indices, rows, number)
        largest = max(largest, int(bags.indices.max()))
        rows_of_batch, lookups_of_batch = sum_by_bin(np.unique(bags.indices, return_counts=True)[1])
        in_bin += rows_of_batch
        from_bin += lookups_of_batch
        lru.add_lookups(bags.indices)
    if not lru.lookups:
        raise TraincastError("no lookups in the indices; give at least one batch with some")
    histogram = ReuseHistogram.from_bins(in_bin, from_bin, number)
    samples = lengths.sum()
    seen = np.flatnonzero(lengths)
    pooling = Pooling(tuple(float(n) for n in seen), tuple(float(n) for n in lengths[seen] / samples))
    return MeasuredAccess(
        batches=number,
        lookups=histogram.lookups,
        unique_rows=histogram.unique_rows,
        access=Reuse(histogram),
        pooling=pooling,
        lru=lru,
        largest_index=largest,
    )


def _add_lengths(first: IntArray, lengths: IntArray) -> IntArray:
    """Samples by length, with those of one more batch."""
    if len(lengths) and lengths.max() > MAX_POOLING:
        raise TraincastError(f"lengths: a sample of {lengths.max()} lookups; {MAX_POOLING} are the most")
    second = np.bincount(lengths)
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def _check_indices(indices: IntArray, rows: int | None, batch: int) -> None:
    smallest, largest = int(indices.min()), int(indices.max())
    most = MAX_INDEX if rows is None else rows - 1
    if smallest < 0 or largest > most:
        wrong = smallest if smallest < 0 else largest
        place = int(np.flatnonzero(indices == wrong)[0])
        raise TraincastError(
            f"index {wrong} is outside the table (batch {batch}, lookup {place}); row numbers run from 0 to {most}"
        )
