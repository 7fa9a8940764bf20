"""A distribution of times that can be merged with others: logarithmic bins with their counts and sums."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from traincast.utils.arrays import FloatArray

_LOWEST, _RATIO, _BINS = 1e-8, 1.05, 480  # seconds; the last bin begins at 130 s


def _make_zeros() -> FloatArray:
    return np.zeros(_BINS)


@dataclass(eq=False, slots=True)
class Distribution:
    """Times in seconds. Quantiles are exact to half a bin (2.5 %), means exact."""

    counts: FloatArray = field(default_factory=_make_zeros)
    sums: FloatArray = field(default_factory=_make_zeros)
    squares: FloatArray = field(default_factory=_make_zeros)

    @staticmethod
    def from_samples(seconds: FloatArray) -> Distribution:
        """The distribution of these times; negative ones count as zero."""
        values = np.maximum(np.asarray(seconds, dtype=np.float64), 0.0)
        place = np.log(np.maximum(values, _LOWEST) / _LOWEST) / np.log(_RATIO)
        bins = np.minimum(place.astype(np.int64), _BINS - 1)
        return Distribution(
            np.bincount(bins, minlength=_BINS).astype(np.float64),
            np.bincount(bins, weights=values, minlength=_BINS).astype(np.float64),
            np.bincount(bins, weights=values * values, minlength=_BINS).astype(np.float64),
        )

    def merge_with(self, other: Distribution) -> Distribution:
        """Both together, every sample counted alike."""
        return Distribution(self.counts + other.counts, self.sums + other.sums, self.squares + other.squares)

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self.counts.sum())

    @property
    def total(self) -> float:
        """Sum of all samples, outliers included."""
        return float(self.sums.sum())

    def compute_quantile(self, share: float) -> float:
        """The time below which this share of the samples is."""
        reached = np.cumsum(self.counts)
        place = int(np.searchsorted(reached, share * reached[-1], side="left"))
        while self.counts[place] == 0:
            place += 1
        return float(self.sums[place] / self.counts[place])

    def compute_mean_below(self, limit: float) -> float:
        """Mean in seconds of the samples under `limit` seconds, to half a bin."""
        edges = _LOWEST * _RATIO ** np.arange(_BINS)
        counted = self.counts[edges < limit].sum()
        return float(self.sums[edges < limit].sum() / counted) if counted else 0.0

    def compute_robust_moments(self) -> tuple[float, float]:
        """Mean and standard deviation without outliers: samples over 1.5 interquartile ranges beyond the quartiles."""
        if not self.count:
            return 0.0, 0.0
        low, high = self.compute_quantile(0.25), self.compute_quantile(0.75)
        reach = 1.5 * max(high - low, 0.05 * high)
        centre = np.divide(self.sums, self.counts, out=np.zeros(_BINS), where=self.counts > 0)
        kept = (self.counts > 0) & (centre >= low - reach) & (centre <= high + reach)
        count = self.counts[kept].sum()
        mean = self.sums[kept].sum() / count
        return float(mean), float(np.sqrt(max(self.squares[kept].sum() / count - mean * mean, 0.0)))

    def summarise_us(self) -> dict[str, float]:
        """Count, robust mean and deviation, and quantiles, in microseconds, for people and files."""
        mean, deviation = self.compute_robust_moments()
        figures = {"mean": mean, "std": deviation, "median": self.compute_quantile(0.5)}
        figures |= {f"p{round(100 * share):02d}": self.compute_quantile(share) for share in (0.05, 0.25, 0.75, 0.95)}
        return {"count": self.count, **{name: round(1e6 * value, 3) for name, value in figures.items()}}
