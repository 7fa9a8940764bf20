"""The hottest rows of a batch: few, each accessed so often that its count is as good as its rate.

Shares rounded to three decimals say how many lookups a bin of hot rows gets, but not how many rows share them. That is
an integer, and each possible one is as likely as this many counts of the bin are to add up to those lookups.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, sqrt

import numpy as np

from traincast.utils.arrays import FloatArray

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
