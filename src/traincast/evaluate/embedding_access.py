"""Analytic estimates of different rows and cache hits against exact counts, on drawn indices.

Zipf indices are drawn from the law itself, row by row; the published histograms become batches with exactly those
counts, in random order. Neither knows the classes that the estimates sum over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.embeddings.access import Reuse, Zipf
from traincast.embeddings.classes import BIN_EDGES, NUM_BINS, RowClasses
from traincast.embeddings.lru import IntArray, LruCounter
from traincast.embeddings.reuse import ReuseHistogram
from traincast.evaluate.metrics import ErrorRow, error_row
from traincast.fit.embedding_sets import Locality, read_locality

SUITE = "embedding-access"
EXPONENTS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
HEIGHTS = (10_000, 1_000_000)
LOOKUPS = 1_000_000
CACHES = tuple(4**power for power in range(3, 10))  # rows
SMALL_CACHE = 1024  # below, three decimals of a histogram say too little about the hottest rows
FEWEST_EVENTS = 10_000  # an exact count of fewer says little to 3 %
PUBLISHED = (
    ("locality_2021.csv", "fbgemm_t856_bs65536"),
    ("locality_2021.csv", "fbgemm_t856_bs65536_0"),
    ("locality_2022.csv", "fbgemm_t788_bs131072_0"),
)
_SEED = 9000
_SHRUNK = 400  # of so many published rows one is drawn, with the published counts


@dataclass(frozen=True, slots=True)
class Point:
    """One estimate beside the exact count."""

    group: str
    name: str
    estimate: float
    exact: float


def evaluate_embedding_access(data: Path, progress: Callable[[float], None] = lambda _: None) -> list[ErrorRow]:
    """Error tables by kind of distribution and question."""
    points: list[Point] = []
    for number, exponent in enumerate(EXPONENTS):
        for rows in HEIGHTS:
            points += zipf_points(exponent, rows, seed=_SEED + number)
        progress((number + 1) / (len(EXPONENTS) + len(PUBLISHED)))
    for number, (file, name) in enumerate(PUBLISHED):
        points += published_points(read_locality(data / "embedding_access" / file)[name], name, seed=_SEED + number)
        progress((len(EXPONENTS) + number + 1) / (len(EXPONENTS) + len(PUBLISHED)))
    return error_rows(points)


def error_rows(points: Iterable[Point]) -> list[ErrorRow]:
    """One row a group, in order of appearance."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    return [
        error_row(SUITE, group, [p.estimate for p in own], [p.exact for p in own], [p.name for p in own])
        for group, own in groups.items()
    ]


def zipf_points(exponent: float, rows: int, *, seed: int, lookups: int = LOOKUPS) -> Iterator[Point]:
    """A Zipf table, its law given; and given only the histogram of a quarter of the stream, the whole extrapolated."""
    indices = draw_zipf(exponent, rows, lookups, np.random.default_rng(seed))
    exact = count_exactly(indices)
    label = f"s {exponent:g}, {rows} rows"
    classes = Zipf(exponent).classes(rows)
    yield from _unique_points("Zipf, different rows", label, classes, exact)
    yield from _hit_points("Zipf, hits from empty", label, classes, exact)
    yield from _steady_points("Zipf, hits in steady state", label, classes, indices)
    quarter = ReuseHistogram.of_counts(np.bincount(indices[: lookups // 4]))
    seen = Reuse(quarter).classes(rows)
    yield from _unique_points("histogram of a Zipf batch, different rows up to 4 x", label, seen, exact)
    yield from _hit_points("histogram of a Zipf batch, hits over 4 x", label, seen, exact)


def published_points(published: Locality, name: str, *, seed: int) -> Iterator[Point]:
    """Indices with the counts of a published histogram, judged from their histogram in three decimals and exact."""
    indices = draw_published(published, np.random.default_rng(seed))
    exact = count_exactly(indices)
    shares = ReuseHistogram.of_counts(np.bincount(indices))
    rounded = ReuseHistogram(
        lookups=shares.lookups,
        unique_rows=shares.unique_rows,
        row_shares=tuple(round(share, 3) for share in shares.row_shares),
        access_shares=tuple(round(share, 3) for share in shares.access_shares),
        precision=0.001,
    )
    for kind, histogram in (("exact shares", shares), ("three decimals", rounded)):
        for rows_per_unique in (1, 4):
            classes = Reuse(histogram).classes(int(rows_per_unique * shares.unique_rows))
            label = f"{name}, {rows_per_unique} x rows"
            yield from _unique_points(f"published, {kind}, different rows", label, classes, exact)
            yield from _hit_points(f"published, {kind}, hits", label, classes, exact, SMALL_CACHE)


@dataclass(frozen=True, slots=True)
class Exact:
    """Counts of one stream: mean different rows by batch size, hits by cache size, where there are enough of them."""

    lookups: int
    unique_rows: dict[int, float]
    hits: dict[int, int]


def count_exactly(indices: IntArray) -> Exact:
    """Batches of several sizes, each the mean of up to 32; the whole stream through caches that begin empty."""
    unique = {}
    for share in (1, 4, 16, 64, 256):
        size = len(indices) // share
        counts = [len(np.unique(indices[i * size : (i + 1) * size])) for i in range(min(share, 32))]
        if sum(counts) >= FEWEST_EVENTS:
            unique[size] = float(np.mean(counts))
    counter = LruCounter(max(CACHES))
    counter.feed(indices)
    hits = {cache: counter.hits(cache) for cache in CACHES if counter.hits(cache) >= FEWEST_EVENTS}
    return Exact(len(indices), unique, hits)


def draw_zipf(exponent: float, rows: int, lookups: int, rng: np.random.Generator) -> IntArray:
    """Row numbers by inversion of the law's distribution function, one entry a row."""
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return np.asarray(np.searchsorted(cumulative, rng.random(lookups) * cumulative[-1]), dtype=np.int64)


def draw_published(published: Locality, rng: np.random.Generator) -> IntArray:
    """Row numbers in random order, each as often as a count drawn log-uniformly from its bin says."""
    histogram = ReuseHistogram(
        lookups=published.lookups,
        unique_rows=published.unique_rows,
        row_shares=tuple(published.row_shares),
        access_shares=tuple(published.access_shares),
        precision=0.001,
    )
    counts = []
    for number, rows in enumerate(histogram.counts()[0]):
        low = BIN_EDGES[number] + 1
        high = BIN_EDGES[number + 1] if number + 1 < NUM_BINS else 2 * BIN_EDGES[number]
        drawn = low * ((high + 1) / low) ** rng.random(round(rows / _SHRUNK))
        counts.append(np.minimum(np.floor(drawn), high).astype(np.int64))
    each = np.concatenate(counts)
    return rng.permutation(np.repeat(np.arange(len(each)), each))


def _unique_points(group: str, label: str, classes: RowClasses, exact: Exact) -> Iterator[Point]:
    for size, count in exact.unique_rows.items():
        yield Point(group, f"{label}, {size} lookups", classes.unique_rows(size), count)


def _hit_points(group: str, label: str, classes: RowClasses, exact: Exact, small: int = 0) -> Iterator[Point]:
    """Caches below `small` rows are a group of their own."""
    for cache, hits in exact.hits.items():
        where = f"{group}, caches below {small} rows" if cache < small else group
        yield Point(where, f"{label}, cache {cache}", classes.hits(cache, exact.lookups), float(hits))


def _steady_points(group: str, label: str, classes: RowClasses, indices: IntArray) -> Iterator[Point]:
    """The second half of the stream, for caches that the first half fills."""
    half = len(indices) // 2
    counter = LruCounter(max(CACHES))
    counter.feed(indices[:half])
    before = {cache: counter.hits(cache) for cache in CACHES}
    counter.feed(indices[half:])
    for cache in CACHES:
        hits = counter.hits(cache) - before[cache]
        if hits >= FEWEST_EVENTS and classes.window(cache) < half:
            yield Point(group, f"{label}, cache {cache}", classes.steady_hit_rate(cache), hits / (len(indices) - half))
