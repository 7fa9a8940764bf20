"""How often rows repeat: classes of equal popularity, reuse histograms of a batch, and what follows for batches and
caches.

Every access distribution becomes `RowClasses`, so each question has one result: sums over a few hundred classes,
however many rows there are. Caches are least-recently-used; their hit rate is Che's approximation: a row hits when it
was accessed within the last `compute_cache_window` lookups, the number in which as many different rows appear as the
cache holds.

Shares rounded to three decimals say how many lookups a bin of hot rows gets, but not how many rows share them. That is
an integer, and each possible one is as likely as this many counts of the bin are to add up to those lookups.

A batch shows counts, not popularities: a row seen once may stand for many that were not seen. The popularities are
found as the mixture of Poisson rates that explains both columns of the histogram and the rows that stayed unseen
(Richardson and Lucy's iteration, which keeps every class at zero or above).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, erfc, floor, inf, sqrt

import numpy as np

from traincast.utils.arrays import FloatArray, IntArray
from traincast.utils.errors import TraincastError

_SUMMED = 64  # up to here term by term; beyond, Wilson and Hilferty's normal form is right to 1e-4

_erfc = np.frompyfunc(erfc, 1, 1)


def compute_poisson_cdf(count: int | None, mean: FloatArray) -> FloatArray:
    """Probability of at most `count` for each mean; None stands for no bound. Below zero: impossible."""
    if count is None:
        return np.ones_like(mean)
    if count < 0:
        return np.zeros_like(mean)
    if count <= _SUMMED:
        term = np.exp(-np.minimum(mean, 700.0))
        total = term.copy()
        for k in range(1, count + 1):
            term = term * mean / k
            total += term
        return np.asarray(np.where(mean > 700.0, 0.0, np.minimum(total, 1.0)))
    freedom = 2.0 * (count + 1)
    spread = 2.0 / (9.0 * freedom)
    score = (np.cbrt(2.0 * mean / freedom) - (1.0 - spread)) / sqrt(spread)
    return 0.5 * np.asarray(_erfc(score / sqrt(2.0)), dtype=np.float64)


BIN_EDGES = (0, *(2**power for power in range(16)))
"""Reuse bins: (0, 1], (1, 2], (2, 4], ... (16384, 32768], and beyond 32768."""
NUM_BINS = len(BIN_EDGES)
_BISECTIONS = 60  # halve any window to a double's precision


@dataclass(frozen=True, eq=False, slots=True)
class RowClasses:
    """`rows[i]` rows are each accessed with `probability[i]` by a lookup; rows * probability sum to one."""

    rows: FloatArray
    probability: FloatArray

    @staticmethod
    def from_weights(rows: FloatArray, weight: FloatArray) -> RowClasses:
        """Classes from any positive weights; rows nobody accesses are left out."""
        wanted = (rows > 0) & (weight > 0)
        rows, weight = rows[wanted], weight[wanted]
        return RowClasses(rows, weight / float(rows @ weight))

    def _compute_access_probability(self, lookups: float) -> FloatArray:
        """Probability that a row of each class is among this many lookups."""
        never = np.log1p(-np.minimum(self.probability, 1.0 - 1e-15))
        return np.asarray(-np.expm1(lookups * never))

    def count_unique_rows(self, lookups: float) -> float:
        """Expected number of different rows among `lookups`."""
        return float(self.rows @ self._compute_access_probability(lookups))

    def compute_cache_window(self, cache_rows: float) -> float:
        """Lookups in which as many different rows are expected as the cache holds; infinite when all rows fit."""
        if cache_rows >= float(self.rows.sum()) * (1.0 - 1e-12):
            return inf
        low = max(cache_rows, 1e-9)
        high = 2.0 * low
        while self.count_unique_rows(high) < cache_rows:
            low, high = high, 4.0 * high
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.count_unique_rows(middle) < cache_rows else (low, middle)
        return 0.5 * (low + high)

    def compute_steady_hit_rate(self, cache_rows: float) -> float:
        """Share of lookups that find their row in a cache of this many rows that has been in use for long."""
        window = self.compute_cache_window(cache_rows)
        return 1.0 if window == inf else self._compute_recent_probability(window)

    def count_hits(self, cache_rows: float, lookups: float) -> float:
        """Expected hits among `lookups` that begin with an empty cache: until it is full, every repeat hits."""
        window = self.compute_cache_window(cache_rows)
        if window >= lookups:
            return lookups - self.count_unique_rows(lookups)
        return (window - cache_rows) + (lookups - window) * self._compute_recent_probability(window)

    def _compute_recent_probability(self, window: float) -> float:
        """Probability that the row a lookup accesses is among the `compute_cache_window` lookups before it."""
        return float((self.rows * self.probability) @ self._compute_access_probability(window))

    def compute_reuse(self, lookups: float) -> tuple[FloatArray, FloatArray]:
        """Expected rows, and lookups, in each reuse bin when `lookups` are made. Counts are taken as Poisson."""
        row_share, access_share = compute_bin_shares(self.probability * lookups)
        return row_share @ self.rows, access_share @ self.rows


def compute_bin_shares(means: FloatArray) -> tuple[FloatArray, FloatArray]:
    """For Poisson counts of these means: probability of each reuse bin, and expected count from it; [17, n] each."""
    ends = [*BIN_EDGES[1:], None]
    counts = np.stack([compute_poisson_cdf(end, means) for end in (0, *ends)])
    shifted = np.stack([compute_poisson_cdf(None if end is None else end - 1, means) for end in (0, *ends)])
    return np.diff(counts, axis=0), means * np.diff(shifted, axis=0)


TYPICAL = 1.4  # mean count of a bin over its lower edge, for counts that thin out like a power law
SPREAD = 0.2  # of the counts inside a bin about their mean: a power law over one octave
_FEW = 32.0  # rows beyond which their number is as good as known
_ROUNDING = 1e-9  # of a quotient that should be whole


@dataclass(frozen=True, kw_only=True, slots=True)
class HotBin:
    """A bin of counts in (lower, upper]: its `rows` and `lookups` as best known.

    Rounding allows `fewest` to `most` rows, and lookups off by `blur`.
    """

    lower: float
    upper: float
    rows: float
    lookups: float
    fewest: float
    most: float
    blur: float

    def make_classes(self) -> tuple[FloatArray, FloatArray]:
        """Expected rows, and their counts: two classes about the mean count for every number of rows there may be."""
        if self.rows <= 0.0:
            return np.zeros(0), np.zeros(0)
        number, chance = np.array([self.rows]), np.ones(1)
        if self.blur > 0.0 and self.rows < _FEW:
            number, chance = self._list_row_counts()
        mean = self.lookups / number
        room = np.minimum(mean - self.lower, self.upper - mean) / mean
        apart = SPREAD * np.sqrt(np.maximum(1.0 - 1.0 / number, 0.0))  # a lone row has all the lookups
        apart = np.minimum(apart, np.maximum(room, 0.0))
        half = 0.5 * chance * number
        return np.concatenate([half, half]), np.concatenate([mean * (1.0 - apart), mean * (1.0 + apart)])

    def _list_row_counts(self) -> tuple[FloatArray, FloatArray]:
        """Integers of rows that rounding and the edges of the bin allow, and how likely each is."""
        first = ceil(max((self.lookups - self.blur) / self.upper, self.fewest, 1.0) - _ROUNDING)
        last = floor(min((self.lookups + self.blur) / (self.lower + 1.0), self.most) + _ROUNDING)
        number = np.arange(first, max(first, last) + 1, dtype=np.float64)
        usual = TYPICAL * self.lower
        sigma = np.hypot(SPREAD * usual * np.sqrt(number), self.blur / sqrt(3.0))
        squares = ((self.lookups - number * usual) / sigma) ** 2
        likely = np.exp(-0.5 * (squares - squares.min())) / sigma
        return number, likely / likely.sum()


_SUM_SLACK = 0.02  # of shares that should add up to 1: 17 of them rounded to three decimals are off by 0.009 at most
_MEAN_SLACK = 0.02  # what rounding may move the mean count of a bin
_COARSEST = 0.01  # coarser shares say nothing about hot rows
_DIRECT_FROM = 8  # bins of counts beyond 128: a count is as good as a rate
_UNSEEN_WEIGHT = 0.02  # the histogram counts for more than the number of rows of the table, where the two disagree
_RATES = 48  # geometric, 20 % apart
_LOWEST_RATE = 0.02  # rows accessed once in 50 such batches stand for all rarer ones
_ITERATIONS = 200  # steps of Richardson and Lucy; a choice, as is the number of rates


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
        if not 0 < self.unique_rows <= self.lookups < inf:
            raise TraincastError(
                f"reuse histogram: unique_rows {self.unique_rows:g} must be above 0 and at most "
                f"lookups {self.lookups:g}, which must be finite"
            )
        if not 0.0 <= self.precision <= _COARSEST:
            raise TraincastError(
                f"reuse histogram: precision {self.precision:g}; give the step of rounding, from 0 to {_COARSEST:g}"
            )
        for name in ("row_shares", "access_shares"):
            shares = getattr(self, name)
            if len(shares) != NUM_BINS:
                raise TraincastError(f"reuse histogram: {name} has {len(shares)} bins; give {NUM_BINS}")
            if not all(0.0 <= share <= 1.0 for share in shares) or abs(sum(shares) - 1.0) > _SUM_SLACK:
                raise TraincastError(f"reuse histogram: {name} must be shares between 0 and 1 that sum to 1")
        self._check_means()

    @staticmethod
    def from_counts(counts: IntArray) -> ReuseHistogram:
        """The histogram of how often each row was accessed; zeros are ignored."""
        return ReuseHistogram.from_bins(*sum_by_bin(counts[counts > 0]))

    @staticmethod
    def from_bins(rows: FloatArray, accesses: FloatArray, batches: int = 1) -> ReuseHistogram:
        """The mean histogram of `batches` whose rows and lookups in every bin were counted together."""
        unique_rows, lookups = float(rows.sum()), float(accesses.sum())
        if not lookups:
            raise TraincastError("reuse histogram: the batch has no lookups; give indices")
        return ReuseHistogram(
            lookups=lookups / batches,
            unique_rows=unique_rows / batches,
            row_shares=tuple(float(n) for n in rows / unique_rows),
            access_shares=tuple(float(n) for n in accesses / lookups),
        )

    def _compute_mean_bounds(self) -> tuple[FloatArray, FloatArray]:
        """Least and largest mean count of every bin that the shares allow, rounded as they are."""
        half, reuse = 0.5 * self.precision, self.lookups / self.unique_rows
        rows, accesses = np.array(self.row_shares), np.array(self.access_shares)
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.nan_to_num((accesses - half) / (rows + half) * reuse, nan=0.0)
            most = np.where(rows > half, (accesses + half) / (rows - half) * reuse, np.inf)
        return least, most

    def _check_means(self) -> None:
        """Rows of a bin were accessed as often as the bin says, or rows and lookups are not those of one batch."""
        least, most = self._compute_mean_bounds()
        lower = np.array(BIN_EDGES) + 1.0
        upper = np.array([*BIN_EDGES[1:], inf])
        wrong = np.flatnonzero((least > upper * (1.0 + _MEAN_SLACK)) | (most < lower * (1.0 - _MEAN_SLACK)))
        if len(wrong):
            number = int(wrong[0])
            mean = least[number] if least[number] > upper[number] else most[number]
            raise TraincastError(
                f"reuse histogram: rows of bin {number + 1} are accessed {mean:.4g} times each by its shares, but the "
                f"bin is {lower[number]:g} to {upper[number]:g}; correct them, or give 'precision' if they are rounded"
            )

    def compute_counts(self) -> tuple[FloatArray, FloatArray]:
        """Rows and lookups of every bin, made consistent where rounding blurs them.

        The mean count of a bin is within its edges and within what the rounded shares allow. The column with the
        larger share, which rounding blurs less, is kept.
        """
        rows, accesses = np.array(self.row_shares), np.array(self.access_shares)
        least, most = self._compute_mean_bounds()
        lower = np.array(BIN_EDGES, dtype=np.float64)
        upper = np.array([*BIN_EDGES[1:], max(self.lookups, BIN_EDGES[-1] + 1.0)], dtype=np.float64)
        low = np.clip(least, lower + 1.0, upper)
        mean = np.clip(np.clip(TYPICAL * lower, low, np.maximum(most, low)), lower + 1.0, upper)
        by_access = accesses > rows
        in_bin = np.where(by_access, accesses * self.lookups / mean, rows * self.unique_rows)
        return in_bin, in_bin * mean

    def make_classes(self, table_rows: float) -> RowClasses:
        """Popularities of a table of `table_rows` that would show this histogram."""
        rows, accesses = self.compute_counts()
        few = slice(0, _DIRECT_FROM)
        unseen = max(table_rows - float(rows.sum()), 0.0)
        parts = [_fit_poisson_rates(rows[few], accesses[few], unseen)]
        half = 0.5 * self.precision
        for number in range(_DIRECT_FROM, NUM_BINS):
            hot = HotBin(
                lower=BIN_EDGES[number],
                upper=BIN_EDGES[number + 1] if number + 1 < NUM_BINS else inf,
                rows=float(rows[number]),
                lookups=float(accesses[number]),
                fewest=(self.row_shares[number] - half) * self.unique_rows,
                most=(self.row_shares[number] + half) * self.unique_rows,
                blur=half * self.lookups,
            )
            parts.append(hot.make_classes())
        class_rows, rates = (np.concatenate(column) for column in zip(*parts, strict=True))
        return RowClasses.from_weights(class_rows, rates)


def sum_by_bin(counts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Rows, and their lookups, in every bin; `compute_counts` says how often each row was accessed, never zero."""
    which = np.searchsorted(BIN_EDGES[1:], counts, side="left")
    rows = np.bincount(which, minlength=NUM_BINS).astype(np.float64)
    return rows, np.bincount(which, weights=counts, minlength=NUM_BINS).astype(np.float64)


def _fit_poisson_rates(rows: FloatArray, accesses: FloatArray, unseen: float) -> tuple[FloatArray, FloatArray]:
    """Poisson rates, and how many rows have each, behind the bins of small counts and the rows that stayed unseen."""
    rates, by_rows, by_accesses = _make_rate_basis()
    bins = len(rows)
    scale = float(rows.sum() / max(accesses.sum(), 1e-300))
    beyond = by_rows[bins:].sum(axis=0)
    system = np.stack([_UNSEEN_WEIGHT * np.exp(-rates), *by_rows[:bins], *(scale * by_accesses[:bins]), beyond])
    wanted = np.concatenate([[_UNSEEN_WEIGHT * unseen], rows, scale * accesses, [0.0]])
    return _fit_by_richardson_lucy(system, wanted), rates


@cache
def _make_rate_basis() -> tuple[FloatArray, FloatArray, FloatArray]:
    """The rates tried, and what a row of each adds to the bins of rows and of lookups."""
    rates = np.concatenate([[0.0], np.geomspace(_LOWEST_RATE, 1.0 * BIN_EDGES[_DIRECT_FROM], _RATES)])
    return rates, *compute_bin_shares(rates)


def _fit_by_richardson_lucy(system: FloatArray, wanted: FloatArray) -> FloatArray:
    """Weights at or above zero for which `system @ weights` comes near `wanted`."""
    reach = system.sum(axis=0)
    weights = np.full(system.shape[1], wanted.sum() / system.sum())
    for _ in range(_ITERATIONS):
        ratio = wanted / np.maximum(system @ weights, 1e-300)
        weights = weights * (ratio @ system) / reach
    return np.asarray(weights)
