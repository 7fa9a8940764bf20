"""Analytic estimates of different rows and cache hits against exact counts, on drawn indices.

An estimate is an expectation. Where a histogram leaves open how few rows are the hottest, single draws from it differ
by more than the estimate can be wrong: they are shown, and so is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from traincast.models.embeddings.access import Reuse, Zipf
from traincast.models.embeddings.raw import LruCounter
from traincast.models.embeddings.reuse import ReuseHistogram, RowClasses
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.suites.embedding_draws import (
    CACHES,
    FEWEST_EVENTS,
    LOG_UNIFORM,
    THINNING,
    Exact,
    count_exactly,
    draw_beginning,
    draw_part,
    draw_zipf,
)
from traincast_evaluation.suites.embedding_locality import Locality, read_locality

SUITE = "embedding-access"
EXPONENTS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
HEIGHTS = (10_000, 1_000_000)
LOOKUPS = 1_000_000  # drawn per Zipf table
SMALL_CACHE = 1024  # rows; below, three decimals of a histogram leave much open
DRAWS = 16  # of each published set: one per batch, where it has this many
LAWS = {"published": (THINNING, DRAWS), "log-uniform": (LOG_UNIFORM, 4)}
"""Names of groups, with how counts are within bins and how many parts of each set are drawn so."""
_SEED = 9000  # the method was developed with others
_ONE_IN = 400  # of this many published rows one is drawn, with the published counts
BEGINNING = 4_000_000  # lookups drawn of a whole published batch
_PRECISION = 0.001  # of the published shares


@dataclass(frozen=True, slots=True)
class Point:
    """One estimate alongside the exact count. Several of one name are draws of the same thing."""

    group: str
    name: str
    estimate: float
    exact: float


def read_published_sets(data: Path) -> dict[str, list[Locality]]:
    """The published batches by set: 16 alike of 2021, the one of 2021 twice as large, 16 alike of 2022."""
    sets: dict[str, list[Locality]] = {"2021": [], "2021 large": [], "2022": []}
    for year in ("2021", "2022"):
        for name, batch in read_locality(data / "embedding_access" / f"locality_{year}.csv").items():
            numbered = name.rpartition("_")[2].isdecimal()
            sets.setdefault(year if numbered else f"{year} large", []).append(batch)
    missing = [name for name, batches in sets.items() if not batches]
    if missing:
        raise TraincastError(
            f"no batch of the set '{missing[0]}' in '{data / 'embedding_access'}'; give the whole files"
        )
    return sets


def evaluate_embedding_access(data: Path, progress: Callable[[float], None] = lambda _: None) -> list[ErrorRow]:
    """Error tables by kind of distribution and question."""
    sets = read_published_sets(data)
    tasks: list[Callable[[], Iterable[Point]]] = [
        partial(compute_zipf_points, exponent, rows, seed=_SEED + number)
        for number, exponent in enumerate(EXPONENTS)
        for rows in HEIGHTS
    ]
    for law, (_, draws) in LAWS.items():
        for name, batches in sets.items():
            tasks.append(partial(compute_beginning_points, batches[0], name, law, seed=_SEED))
            several = [(batches[number % len(batches)], _SEED + number) for number in range(draws)]
            tasks.append(partial(compute_drawn_points, several, name, law))
    points: list[Point] = []
    for done, task in enumerate(tasks, start=1):
        points += task()
        progress(done / len(tasks))
    return summarise_access_points(points)


def summarise_access_points(points: Iterable[Point]) -> list[ErrorRow]:
    """One row per group, in order of appearance."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    return [
        compute_error_row(
            SUITE,
            group,
            [p.estimate for p in same_points],
            [p.exact for p in same_points],
            [p.name for p in same_points],
        )
        for group, same_points in groups.items()
    ]


def compute_zipf_points(exponent: float, rows: int, *, seed: int, lookups: int = LOOKUPS) -> Iterator[Point]:
    """A Zipf table, its law given; and given only the histogram of a quarter of the stream, the whole extrapolated."""
    indices = draw_zipf(exponent, rows, lookups, np.random.default_rng(seed))
    exact = count_exactly(indices)
    label = f"s {exponent:g}, {rows} rows"
    classes = Zipf(exponent).make_classes(rows)
    yield from _compute_unique_points("Zipf, different rows", label, classes, exact)
    yield from _compute_hit_points("Zipf, hits from empty", label, classes, exact)
    yield from _compute_steady_points("Zipf, hits in steady state", label, classes, indices)
    quarter = ReuseHistogram.from_counts(np.bincount(indices[: lookups // 4]))
    seen = Reuse(quarter).make_classes(rows)
    yield from _compute_unique_points("histogram of a Zipf batch, different rows up to 4 x", label, seen, exact)
    yield from _compute_hit_points("histogram of a Zipf batch, hits over 4 x", label, seen, exact)


def compute_beginning_points(
    published: Locality, name: str, law: str, *, seed: int, lookups: int = BEGINNING
) -> Iterator[Point]:
    """The first lookups of a whole batch with a published histogram, judged from that histogram as it was published."""
    histogram = ReuseHistogram(
        lookups=published.lookups,
        unique_rows=published.unique_rows,
        row_shares=tuple(published.row_shares),
        access_shares=tuple(published.access_shares),
        precision=_PRECISION,
    )
    classes = Reuse(histogram).make_classes(round(published.unique_rows))
    exact = count_exactly(draw_beginning(published, lookups, LAWS[law][0], np.random.default_rng(seed)))
    yield from _compute_unique_points(f"{law}, whole batch, different rows", name, classes, exact)
    yield from _compute_hit_points(f"{law}, whole batch, hits", name, classes, exact, SMALL_CACHE)


def compute_drawn_points(batches: Sequence[tuple[Locality, int]], name: str, law: str) -> list[Point]:
    """Parts of these batches, each with its seed; and the mean estimate alongside the mean exact count."""
    draws = [point for batch, seed in batches for point in compute_part_points(batch, name, law, seed=seed)]
    same: dict[tuple[str, str], list[Point]] = {}
    for point in draws:
        same.setdefault((point.group, point.name), []).append(point)
    for (group, what), same_points in same.items():
        estimate, exact = (
            float(np.mean(column)) for column in zip(*((p.estimate, p.exact) for p in same_points), strict=True)
        )
        draws.append(Point(f"{group}, mean of draws", f"{what}, {len(same_points)} draws", estimate, exact))
    return draws


def compute_part_points(published: Locality, name: str, law: str, *, seed: int) -> Iterator[Point]:
    """A part of a batch, as few rows as a large table has, judged from its own histogram, exact and rounded."""
    indices = draw_part(published, _ONE_IN, LAWS[law][0], np.random.default_rng(seed))
    exact = count_exactly(indices)
    shares = ReuseHistogram.from_counts(np.bincount(indices))
    for kind, histogram in (("exact shares", shares), ("three decimals", round_histogram(shares))):
        for rows_per_unique in (1, 4):
            classes = Reuse(histogram).make_classes(int(rows_per_unique * shares.unique_rows))
            label = f"{name}, {rows_per_unique} x rows"
            yield from _compute_unique_points(f"{law}, {kind}, different rows", label, classes, exact, len(indices))
            yield from _compute_hit_points(f"{law}, {kind}, hits", label, classes, exact, SMALL_CACHE)


def round_histogram(histogram: ReuseHistogram) -> ReuseHistogram:
    """The histogram in three decimals."""
    return ReuseHistogram(
        lookups=histogram.lookups,
        unique_rows=histogram.unique_rows,
        row_shares=tuple(round(share, 3) for share in histogram.row_shares),
        access_shares=tuple(round(share, 3) for share in histogram.access_shares),
        precision=_PRECISION,
    )


def _compute_unique_points(
    group: str, label: str, classes: RowClasses, exact: Exact, whole: int = 0
) -> Iterator[Point]:
    """Batches are named by size, or by their share of a `whole` that differs from draw to draw."""
    for size, count in exact.unique_rows.items():
        what = f"1 / {round(whole / size)} of the lookups" if whole else f"{size} lookups"
        yield Point(group, f"{label}, {what}", classes.count_unique_rows(size), count)


def _compute_hit_points(group: str, label: str, classes: RowClasses, exact: Exact, small: int = 0) -> Iterator[Point]:
    """Caches below `small` rows are a group of their own."""
    for cache, hits in exact.hits.items():
        where = f"{group}, caches below {small} rows" if cache < small else group
        yield Point(where, f"{label}, cache {cache}", classes.count_hits(cache, exact.lookups), float(hits))


def _compute_steady_points(group: str, label: str, classes: RowClasses, indices: IntArray) -> Iterator[Point]:
    """The second half of the stream, for caches that the first half fills."""
    half = len(indices) // 2
    counter = LruCounter(max(CACHES))
    counter.add_lookups(indices[:half])
    before = {cache: counter.count_hits(cache) for cache in CACHES}
    counter.add_lookups(indices[half:])
    for cache in CACHES:
        hits = counter.count_hits(cache) - before[cache]
        if hits >= FEWEST_EVENTS and classes.compute_cache_window(cache) < half:
            yield Point(
                group, f"{label}, cache {cache}", classes.compute_steady_hit_rate(cache), hits / (len(indices) - half)
            )
