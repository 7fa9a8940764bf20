"""Raw indices with lengths or offsets, batch by batch, and the access distributions measured from them in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.models.embeddings.access import Reuse
from traincast.models.embeddings.classes import NUM_BINS
from traincast.models.embeddings.lru import DEFAULT_LARGEST, MAX_INDEX, LruCounter
from traincast.models.embeddings.reuse import ReuseHistogram, sum_by_bin
from traincast.models.embeddings.table import MAX_POOLING, Pooling
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError

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
