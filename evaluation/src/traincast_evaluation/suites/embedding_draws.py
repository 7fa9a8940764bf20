"""Indices drawn from Zipf's law and from published reuse histograms, and what is counted in them exactly.

Nothing here knows how the estimates are made. A published bin says how many of the rows it has, or, where its lookups
are the larger share, how many of those; counts within it are drawn until there are this many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from traincast.models.embeddings.raw import LruCounter
from traincast.models.embeddings.reuse import BIN_EDGES, NUM_BINS
from traincast.utils.arrays import IntArray
from traincast_evaluation.suites.embedding_locality import Locality

CACHES = tuple(4**power for power in range(2, 10))  # rows
FEWEST_EVENTS = 10_000  # an exact count of fewer says little to 3 %
THINNING, LOG_UNIFORM = 2.0, 1.0
"""How counts are within a bin: rows of count c in proportion to c ** -law.

Where the published bins say both rows and lookups, counts thin out: beyond 16 lookups their mean is 1.39 to 1.41 times
16, which is 1.42 for `THINNING` and 1.47 for `LOG_UNIFORM`. The latter is there to see what the law matters.
"""


@dataclass(frozen=True, slots=True)
class Exact:
    """Counts of one stream: mean different rows by batch size, hits by cache size, where there are enough of them."""

    lookups: int
    unique_rows: dict[int, float]
    hits: dict[int, int]


def count_exactly(indices: IntArray) -> Exact:
    """Batches of several sizes, each the mean of up to 32; the whole stream through caches that begin empty."""
    unique = {}
    order = np.argsort(indices, kind="stable")
    same = indices[order[1:]] == indices[order[:-1]]
    before = np.full(len(indices), -1)
    before[order[1:][same]] = order[:-1][same]
    for share in (1, 4, 16, 64, 256):
        size = len(indices) // share
        counts = [np.count_nonzero(before[i * size : (i + 1) * size] < i * size) for i in range(min(share, 32))]
        if sum(counts) >= FEWEST_EVENTS:
            unique[size] = float(np.mean(counts))
    counter = LruCounter(max(CACHES))
    counter.add_lookups(indices)
    hits = {cache: counter.count_hits(cache) for cache in CACHES if counter.count_hits(cache) >= FEWEST_EVENTS}
    return Exact(len(indices), unique, hits)


def draw_zipf(exponent: float, rows: int, lookups: int, rng: np.random.Generator) -> IntArray:
    """Row numbers by inversion of the law's distribution function, one entry per row."""
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return np.asarray(np.searchsorted(cumulative, rng.random(lookups) * cumulative[-1]), dtype=np.int64)


def draw_part(published: Locality, one_in: int, law: float, rng: np.random.Generator) -> IntArray:
    """All lookups, in random order, of one row in `one_in` of a published batch."""
    row_counts = np.concatenate(list(_draw_counts(published, one_in, law, rng)))
    return rng.permutation(np.repeat(np.arange(len(row_counts)), row_counts))


def draw_beginning(published: Locality, lookups: int, law: float, rng: np.random.Generator) -> IntArray:
    """The first `lookups` of a whole published batch whose lookups come in random order, bin by bin in memory."""
    shares = published.access_shares / published.access_shares.sum()
    drawn = rng.multinomial(lookups, shares)
    first, rows = 0, []
    for number, row_counts in zip(drawn, _draw_counts(published, 1, law, rng), strict=True):
        last = np.cumsum(row_counts)
        if number:
            places = np.sort(rng.choice(int(last[-1]), int(number), replace=False))  # in order they are found faster
            rows.append(first + np.searchsorted(last, places, side="right"))
        first += len(row_counts)
    return rng.permutation(np.concatenate(rows))


def _draw_counts(published: Locality, one_in: int, law: float, rng: np.random.Generator) -> Iterator[IntArray]:
    """How often each row is wanted, bin by bin. The open bin is taken to end where the next octave would."""
    for number in range(NUM_BINS):
        low = BIN_EDGES[number] + 1
        high = BIN_EDGES[number + 1] if number + 1 < NUM_BINS else 2 * BIN_EDGES[number]
        if published.row_shares[number] > published.access_shares[number]:
            rows = round(published.row_shares[number] * published.unique_rows / one_in)
            yield _draw_counts_within(low, high, rows, law, rng)
        else:
            wanted = published.access_shares[number] * published.lookups / one_in
            counts = _draw_counts_within(low, high, int(wanted / low) + 2, law, rng)
            missing = np.abs(np.concatenate([[0], np.cumsum(counts)]) - wanted)
            yield counts[: int(np.argmin(missing))]


def _draw_counts_within(low: int, high: int, rows: int, law: float, rng: np.random.Generator) -> IntArray:
    """Whole counts from `low` to `high`."""
    if low == high:
        return np.full(rows, low)
    slope, ratio = 1.0 - law, (high + 1) / low
    place = rng.random(rows)
    drawn = low * (ratio**place if slope == 0.0 else (1.0 + place * (ratio**slope - 1.0)) ** (1.0 / slope))
    return np.minimum(np.floor(drawn), high).astype(np.int64)
