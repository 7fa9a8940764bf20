"""Reuse histograms: how often the rows of one batch were wanted, in 17 power-of-two bins, and what follows.

A batch shows counts, not popularities: a row seen once may stand for many that were not seen. The popularities are
found as the mixture of Poisson rates that explains both columns of the histogram and the rows that stayed unseen
(Richardson and Lucy's iteration, which keeps every class at zero or above).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from traincast.embeddings.classes import BIN_EDGES, NUM_BINS, FloatArray, RowClasses, bin_shares
from traincast.errors import TraincastError

_TYPICAL = 1.4  # mean count of a bin over its lower edge, for counts that thin out like a power law
_SUM_SLACK = 0.02
_DIRECT_FROM = 8  # bins of counts beyond 128: a count is as good as a rate
_SPREAD = 0.2  # of the counts inside such a bin about their mean: a power law over one octave
_UNSEEN_WEIGHT = 0.02  # the histogram counts for more than the height of the table, where the two disagree
_RATES = 48
_LOWEST_RATE = 0.02
_ITERATIONS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ReuseHistogram:
    """Counts of one batch: `lookups` made, `unique_rows` touched, and per bin the share of those rows and lookups.

    `precision` is the step the shares were rounded to (0.001 for three decimals, 0 for exact ones).
    """

    lookups: float
    unique_rows: float
    row_shares: tuple[float, ...]
    access_shares: tuple[float, ...]
    precision: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.unique_rows <= self.lookups:
            raise TraincastError(
                f"reuse histogram: unique_rows {self.unique_rows:g} must be above 0 and at most "
                f"lookups {self.lookups:g}"
            )
        for name in ("row_shares", "access_shares"):
            shares = getattr(self, name)
            if len(shares) != NUM_BINS:
                raise TraincastError(f"reuse histogram: {name} has {len(shares)} bins; give {NUM_BINS}")
            if not all(0.0 <= share <= 1.0 for share in shares) or abs(sum(shares) - 1.0) > _SUM_SLACK:
                raise TraincastError(f"reuse histogram: {name} must be shares between 0 and 1 that sum to 1")

    @staticmethod
    def of_counts(counts: npt.NDArray[np.int64]) -> ReuseHistogram:
        """The histogram of how often each row was wanted; zeros are ignored."""
        counts = counts[counts > 0]
        which = np.searchsorted(BIN_EDGES[1:], counts, side="left")
        rows = np.bincount(which, minlength=NUM_BINS)
        accesses = np.bincount(which, weights=counts, minlength=NUM_BINS)
        lookups = float(counts.sum())
        if not lookups:
            raise TraincastError("reuse histogram: the batch has no lookups; give indices")
        return ReuseHistogram(
            lookups=lookups,
            unique_rows=float(len(counts)),
            row_shares=tuple(float(n) for n in rows / len(counts)),
            access_shares=tuple(float(n) for n in accesses / lookups),
        )

    def counts(self) -> tuple[FloatArray, FloatArray]:
        """Rows and lookups of every bin, made consistent where rounding blurs them.

        The mean count of a bin lies within its edges and within what the rounded shares allow. The column with the
        larger share, which rounding blurs less, is kept.
        """
        half = 0.5 * self.precision
        rows, accesses = np.array(self.row_shares), np.array(self.access_shares)
        lower = np.array(BIN_EDGES, dtype=np.float64)
        upper = np.array([*BIN_EDGES[1:], max(self.lookups, BIN_EDGES[-1] + 1.0)], dtype=np.float64)
        reuse = self.lookups / self.unique_rows
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.nan_to_num((accesses - half) / (rows + half) * reuse, nan=0.0)
            most = np.where(rows > half, (accesses + half) / (rows - half) * reuse, np.inf)
        low = np.clip(least, lower + 1.0, upper)
        mean = np.clip(np.clip(_TYPICAL * lower, low, np.maximum(most, low)), lower + 1.0, upper)
        by_access = accesses > rows
        in_bin = np.where(by_access, accesses * self.lookups / mean, rows * self.unique_rows)
        return in_bin, in_bin * mean

    def classes(self, table_rows: float) -> RowClasses:
        """Popularities of a table of `table_rows` that would show this histogram."""
        rows, accesses = self.counts()
        few, many = slice(0, _DIRECT_FROM), slice(_DIRECT_FROM, NUM_BINS)
        unseen = max(table_rows - float(rows.sum()), 0.0)
        class_rows, rates = _rates_of_counts(rows[few], accesses[few], unseen)
        mean = accesses[many] / np.maximum(rows[many], 1e-300)
        for factor in (1.0 - _SPREAD, 1.0 + _SPREAD):
            class_rows = np.concatenate([class_rows, 0.5 * rows[many]])
            rates = np.concatenate([rates, factor * mean])
        return RowClasses.of(class_rows, rates)


def _rates_of_counts(rows: FloatArray, accesses: FloatArray, unseen: float) -> tuple[FloatArray, FloatArray]:
    """Poisson rates, and how many rows have each, behind the bins of small counts and the rows that stayed unseen."""
    rates, by_rows, by_accesses = _basis()
    bins = len(rows)
    scale = float(rows.sum() / max(accesses.sum(), 1e-300))
    beyond = by_rows[bins:].sum(axis=0)
    system = np.stack([_UNSEEN_WEIGHT * np.exp(-rates), *by_rows[:bins], *(scale * by_accesses[:bins]), beyond])
    wanted = np.concatenate([[_UNSEEN_WEIGHT * unseen], rows, scale * accesses, [0.0]])
    return _richardson_lucy(system, wanted), rates


@cache
def _basis() -> tuple[FloatArray, FloatArray, FloatArray]:
    """The rates tried, and what a row of each adds to the bins of rows and of lookups."""
    rates = np.concatenate([[0.0], np.geomspace(_LOWEST_RATE, 1.0 * BIN_EDGES[_DIRECT_FROM], _RATES)])
    return rates, *bin_shares(rates)


def _richardson_lucy(system: FloatArray, wanted: FloatArray) -> FloatArray:
    """Weights at or above zero for which `system @ weights` comes near `wanted`."""
    reach = system.sum(axis=0)
    weights = np.full(system.shape[1], wanted.sum() / system.sum())
    for _ in range(_ITERATIONS):
        ratio = wanted / np.maximum(system @ weights, 1e-300)
        weights = weights * (ratio @ system) / reach
    return np.asarray(weights)
