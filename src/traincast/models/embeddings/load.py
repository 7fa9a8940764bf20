"""What a batch asks of embedding tables or parts of them, as numbers that add up over tables.

A kernel over many tables takes as long as their bytes together, so everything here is a sum: of lookups, of rows, of
bytes, and of bytes that miss a cache, at a few sizes of it. Planning adds the loads of single shards; lowering reads
the sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

import numpy as np

from traincast.models.embeddings.access import Access, make_row_classes
from traincast.models.embeddings.levels import SECTOR_BYTES
from traincast.models.embeddings.poisson import compute_poisson_cdf
from traincast.models.embeddings.table import ITEM_BYTES, Table
from traincast.utils.arrays import FloatArray

CACHE_BYTES = tuple(float(1 << power) for power in range(15, 29))
"""Sizes of the cache that one table has to itself at which missing bytes are given: 32 KiB to 256 MiB."""
LONG_RUN = 32
"""Lookups of one row in a batch beyond which FBGEMM's update gives the row a thread block."""
_FP32_BYTES = 4
_WINDOWS = 48  # lookup windows; misses come out within 1 % of Table.hit_rate

FIELDS = (
    "tables",  # how many; a column slice counts as one
    "lookups",
    "distinct_rows",  # different rows that the batch touches
    "columns",  # sum of dims
    "lanes",  # threads that share one sample's bags, over all tables
    "lane_lookups",  # lookups times the threads that work on each
    "row_bytes",  # rows of all lookups, in whole sectors
    "slot_bytes",  # the same as a warp fetches them: 16 bytes per thread
    "touched_bytes",  # different rows, in whole sectors
    "touched_fp32_bytes",  # the same in fp32, as gradients and optimizer state are
    "long_rows",  # rows accessed more than `LONG_RUN` times, and their lookups
    "long_lookups",
    *(f"missing_{int(size) >> 10}k" for size in CACHE_BYTES),  # row bytes that miss a cache of this size per table
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a table as one rank has it: `share` of its rows (with their lookups), and `columns` of each."""

    table: Table
    columns: int
    share: float = 1.0


def total_load(parts: Iterable[Part], batch: int) -> FloatArray:
    """The load of several parts together for a batch of `batch` samples, in the order of `FIELDS`."""
    total = np.zeros(len(FIELDS))
    for part in parts:
        total += compute_part_load(part, batch)
    return total


@lru_cache(maxsize=65536)
def compute_part_load(part: Part, batch: int) -> FloatArray:
    """The load of a part for a batch of `batch` samples, in the order of `FIELDS`. Not to be written to."""
    table = part.table
    return _compute_load(
        table.access, table.rows, table.count_lookups(batch), part.columns, ITEM_BYTES[table.dtype], part.share
    )


@lru_cache(maxsize=8192)
def compute_table_load(access: Access, rows: int, lookups: float, columns: float, item_bytes: int) -> FloatArray:
    """The load of a whole table for this many lookups. Not to be written to."""
    return _compute_load(access, rows, lookups, columns, item_bytes, 1.0)


def find_longest_bag(parts: Iterable[Part]) -> float:
    """Lookups of the longest bag, which one warp makes one after the other."""
    return max((max(part.table.pooling.lengths) * part.share for part in parts), default=0.0)


def count_hottest_row_lookups(table: Table, batch: int) -> float:
    """Expected lookups of the row that a batch accesses most."""
    return table.count_lookups(batch) * float(make_row_classes(table.access, table.rows).probability.max())


def count_fetched_rows(part: Part, batch: int, cache_fraction: float) -> float:
    """Rows that a batch brings from the host into a cache of this share of the table, in use for long."""
    table = part.table
    missing = table.count_lookups(batch) * (1.0 - table.compute_hit_rate(cache_fraction * table.rows))
    return part.share * min(missing, table.count_unique_rows(batch))


def _compute_load(
    access: Access, rows: int, lookups: float, columns: float, item_bytes: int, share: float
) -> FloatArray:
    profile = _make_profile(access, rows, lookups)
    row, lanes = _count_sectors(columns * item_bytes), _count_threads_per_bag(columns)
    part_lookups, distinct = share * lookups, share * min(profile.distinct, float(rows))
    head = (
        1.0, part_lookups, distinct, columns, lanes, part_lookups * lanes, part_lookups * row,
        part_lookups * max(row, 16 * lanes), distinct * row, distinct * _count_sectors(columns * _FP32_BYTES),
        share * profile.long_rows, share * profile.long_lookups,
    )  # fmt: skip
    cached_rows = np.array(CACHE_BYTES) / (row * max(share, 1e-12))
    load = np.concatenate([head, share * row * profile.count_misses(cached_rows)])
    load.flags.writeable = False
    return load


def _count_threads_per_bag(columns: float) -> int:
    """Threads that share a bag: one a four elements, as a power of two from 8 to a warp."""
    return int(min(2 ** ceil(log2(max(columns / 4, 8))), 32))


def _count_sectors(nbytes: float) -> int:
    return ceil(nbytes / SECTOR_BYTES) * SECTOR_BYTES


@dataclass(frozen=True, eq=False, slots=True)
class _Profile:
    """A table's batch: different rows, rows in long runs, and the misses of caches of as many rows as `cache_rows`."""

    distinct: float
    long_rows: float
    long_lookups: float
    cache_rows: FloatArray
    misses: FloatArray

    def count_misses(self, rows: FloatArray) -> FloatArray:
        """Lookups that miss a least-recently-used cache of this many rows, empty when the batch begins."""
        return np.asarray(np.interp(rows, self.cache_rows, self.misses))


@lru_cache(maxsize=8192)
def _make_profile(access: Access, rows: int, lookups: float) -> _Profile:
    """As `RowClasses.hits` for all caches at once: every window of lookups fills the cache of its distinct rows."""
    if lookups <= 0.0:
        return _Profile(0.0, 0.0, 0.0, np.zeros(1), np.zeros(1))
    classes = make_row_classes(access, rows)
    windows = np.geomspace(min(1.0, lookups), lookups, _WINDOWS)
    never = np.log1p(-np.minimum(classes.probability, 1.0 - 1e-15))
    seen = -np.expm1(np.outer(windows, never))
    filled = seen @ classes.rows
    recent = seen @ (classes.rows * classes.probability)
    misses = np.clip(filled + (lookups - windows) * (1.0 - recent), filled[-1], lookups)
    counts = classes.probability * lookups
    long_rows = float(classes.rows @ (1.0 - compute_poisson_cdf(LONG_RUN, counts)))
    long_lookups = float((classes.rows * counts) @ (1.0 - compute_poisson_cdf(LONG_RUN - 1, counts)))
    return _Profile(
        distinct=float(filled[-1]),
        long_rows=min(long_rows, float(filled[-1])),
        long_lookups=min(long_lookups, lookups),
        cache_rows=np.concatenate([[0.0], filled]),
        misses=np.concatenate([[lookups], misses]),
    )
