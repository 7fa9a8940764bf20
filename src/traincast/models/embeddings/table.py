"""Embedding tables: sizes, how many rows a sample accesses and which, and what each optimizer keeps beside the
weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from traincast.models.embeddings.access import Access, Reuse, Uniform, make_row_classes
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
