"""Embedding tables: sizes, lookups per sample, what optimizers keep, and what a batch asks of them, by memory level.

A kernel over many tables takes as long as their bytes together, so everything here is a sum: of lookups, of rows, of
bytes, and of bytes that miss a cache, at a few sizes of it. Planning adds the loads of single shards; lowering reads
the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf, isfinite, log2

import numpy as np

from traincast.models.embeddings.access import Access, Reuse, Uniform, make_row_classes
from traincast.models.embeddings.reuse import compute_poisson_cdf
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError, make_unknown_error

STATE_ITEM_BYTES = 4
"""Bytes of one number of optimizer state: fp32 whatever the weights are (FBGEMM's and PyTorch's default)."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Numbers of state that an optimizer keeps: for every weight, and for every row of a table."""

    per_weight: int = 0
    per_row: int = 0

    @property
    def tensors(self) -> int:
        """Tensors of state of one parameter or table."""
        return self.per_weight + self.per_row

    def count_state_per_row(self, columns: int) -> int:
        """Numbers of state that belong to a row of this many columns."""
        return self.per_weight * columns + self.per_row


OPTIMIZER_STATE = {
    "none": OptimizerState(),
    "sgd": OptimizerState(),
    "adagrad": OptimizerState(per_weight=1),  # sums of squared gradients
    "rowwise_adagrad": OptimizerState(per_row=1),  # a row's mean of them
    "adam": OptimizerState(per_weight=2),  # first and second moment
}


ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
OPTIMIZERS = tuple(OPTIMIZER_STATE)
MAX_ROWS = 1 << 34  # limits beyond any table that was published, which catch sizes in other units
MAX_DIM = 1 << 16  # likewise
MAX_POOLING = 1 << 20  # likewise, lookups of one sample
MAX_TABLES = 1 << 11  # of a set: twice the largest that was published, for which a plan is found in seconds


@dataclass(frozen=True, slots=True)
class Pooling:
    """Lookups of one sample: `shares[i]` of the samples make `lengths[i]` lookups."""

    lengths: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.shares):
            raise TraincastError(
                f"pooling has {len(self.lengths)} lengths and {len(self.shares)} shares; give one each"
            )
        for length in self.lengths:
            if not (isfinite(length) and 0 <= length <= MAX_POOLING):
                raise TraincastError(f"pooling {length:g}; give a number from 0 to {MAX_POOLING}")
        if any(not 0 <= share <= 1 for share in self.shares) or abs(sum(self.shares) - 1.0) > 1e-3:
            raise TraincastError("pooling shares must be between 0 and 1 and sum to 1")

    @staticmethod
    def from_constant(length: float) -> Pooling:
        """Every sample makes `length` lookups (a fraction stands for a mean)."""
        return Pooling((float(length),), (1.0,))

    @property
    def mean(self) -> float:
        """Lookups of an average sample."""
        return sum(length * share for length, share in zip(self.lengths, self.shares, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One embedding table. `weighted` lookups multiply each row by a weight of their own.

    `optimizer` names the update fused into the backward pass; it decides the state kept alongside the weights.
    """

    name: str
    rows: int
    dim: int
    pooling: Pooling
    access: Access = field(default_factory=Uniform)
    dtype: str = "fp32"
    weighted: bool = False
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        if not self.name:
            raise TraincastError("a table has no name; give each table its own")
        for size, value, most in (("rows", self.rows, MAX_ROWS), ("dim", self.dim, MAX_DIM)):
            if not 1 <= value <= most:
                raise TraincastError(f"table '{self.name}': {size} {value}; give a number from 1 to {most}")
        if self.dtype not in ITEM_BYTES:
            raise make_unknown_error(
                "dtype", self.dtype, ITEM_BYTES, f"Table '{self.name}': choose {', '.join(ITEM_BYTES)}."
            )
        if self.optimizer not in OPTIMIZERS:
            raise make_unknown_error(
                "optimizer", self.optimizer, OPTIMIZERS, f"Table '{self.name}': {', '.join(OPTIMIZERS)}."
            )
        if isinstance(self.access, Reuse) and self.access.histogram.unique_rows > self.rows:
            raise TraincastError(
                f"table '{self.name}': its batches touch {self.access.histogram.unique_rows:g} different rows, "
                f"but it has {self.rows}; give at least as many"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of weights."""
        return self.dim * ITEM_BYTES[self.dtype]

    @property
    def state_row_bytes(self) -> int:
        """Bytes of optimizer state that belong to one row."""
        return STATE_ITEM_BYTES * OPTIMIZER_STATE[self.optimizer].count_state_per_row(self.dim)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights and their optimizer state."""
        return self.rows * (self.row_bytes + self.state_row_bytes)

    def count_lookups(self, batch: int) -> float:
        """Expected lookups of a batch of `batch` samples."""
        if not 0 <= batch < inf:
            raise TraincastError(f"batch of {batch} samples; give 0 or more")
        return batch * self.pooling.mean

    def count_unique_rows(self, batch: int) -> float:
        """Expected number of different rows that a batch accesses."""
        return min(
            make_row_classes(self.access, self.rows).count_unique_rows(self.count_lookups(batch)), float(self.rows)
        )

    def count_duplicates(self, batch: int) -> float:
        """Expected lookups of a batch whose gradient joins that of an earlier one of the same row."""
        return self.count_lookups(batch) - self.count_unique_rows(batch)

    def compute_hit_rate(self, cache_rows: float, batch: int | None = None) -> float:
        """Share of lookups that hit an LRU cache of this many rows.

        With `batch` the cache is empty when the batch begins; without it, it has been in use for long.
        """
        if not cache_rows >= 0:
            raise TraincastError(f"a cache of {cache_rows:g} rows; give 0 or more")
        classes = make_row_classes(self.access, self.rows)
        if batch is None:
            return 1.0 if cache_rows >= self.rows else classes.compute_steady_hit_rate(cache_rows)
        lookups = self.count_lookups(batch)
        if not lookups:
            return 0.0
        if cache_rows >= self.rows:
            return self.count_duplicates(batch) / lookups
        return classes.count_hits(cache_rows, lookups) / lookups


def check_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables of a set; there must be some, each with a name of its own."""
    if not tables:
        raise TraincastError("no tables; give at least one")
    if len(tables) > MAX_TABLES:
        raise TraincastError(f"{len(tables)} tables; give at most {MAX_TABLES}, those with the most lookups")
    name, times = Counter(table.name for table in tables).most_common(1)[0]
    if times > 1:
        raise TraincastError(f"table '{name}' appears {times} times; give each table its own name")
    return tuple(tables)


SECTOR_BYTES = 32  # what a GPU's memory moves at the least


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A level with room for `capacity_bytes` of this table. One that is `kept` holds its rows from batch to batch."""

    name: str
    capacity_bytes: float
    kept: bool = False

    def __post_init__(self) -> None:
        if not self.capacity_bytes >= 0:
            raise TraincastError(f"memory level '{self.name}': {self.capacity_bytes:g} bytes; give 0 or more")


@dataclass(frozen=True, slots=True)
class LevelBytes:
    """What a level serves for one batch: row bytes read by the lookups, and read plus written by the update."""

    name: str
    lookup_bytes: float
    update_bytes: float


def compute_bytes_by_level(table: Table, batch: int, levels: Sequence[MemoryLevel]) -> tuple[LevelBytes, ...]:
    """Bytes that each level serves, nearest level first; the last must hold the whole table.

    Levels are least-recently-used and each includes the one before. Rows come in whole 32-byte sectors. The update
    touches every different row of the batch once, with its optimizer state, where the lookups left it.
    """
    row = SECTOR_BYTES * ceil(table.row_bytes / SECTOR_BYTES)
    state = SECTOR_BYTES * ceil(table.state_row_bytes / SECTOR_BYTES)
    if not levels or levels[-1].capacity_bytes < table.memory_bytes:
        raise TraincastError(
            f"table '{table.name}': {table.memory_bytes / 1e9:.3g} GB do not fit the last memory level; "
            "end with one that holds them"
        )
    lookups, unique = table.count_lookups(batch), table.count_unique_rows(batch)
    served, updated, parts = 0.0, 0.0, []
    for level in levels:
        last = level is levels[-1]
        capacity = level.capacity_bytes / row
        share = 1.0 if last else max(served, table.compute_hit_rate(capacity, None if level.kept else batch))
        here = unique if last else min(unique, max(updated, capacity))
        parts.append(LevelBytes(level.name, (share - served) * lookups * row, 2.0 * (here - updated) * (row + state)))
        served, updated = share, here
    return tuple(parts)


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
