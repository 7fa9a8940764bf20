"""Rows of a table in classes of equal popularity, and what independent lookups of them do to batches and caches.

Every access distribution becomes `RowClasses`, so each question has one result: sums over a few hundred classes,
however many rows there are. Caches are least-recently-used; their hit rate is Che's approximation: a row hits when it
was accessed within the last `compute_cache_window` lookups, the number in which as many different rows appear as the
cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from traincast.models.embeddings.poisson import compute_poisson_cdf
from traincast.utils.arrays import FloatArray

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
