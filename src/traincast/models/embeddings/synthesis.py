"""Table sets made up so that, together, they show the published statistics of one batch.

Published are the lookups and different rows of all tables together, and how both spread over reuse bins. The lookups of
each bin are dealt to tables so that sums over tables meet the published figures exactly; how tables differ is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import NormalDist

import numpy as np

from traincast.models.embeddings.access import Reuse
from traincast.models.embeddings.classes import BIN_EDGES
from traincast.models.embeddings.reuse import ReuseHistogram
from traincast.models.embeddings.table import Pooling, Table
from traincast.utils.arrays import FloatArray

POOLING_SPREAD = 1.0  # of the natural logarithm of pooling over tables
HOTNESS_SPREAD = 0.35  # of the natural logarithm by which a table prefers a bin over the one below
HEIGHT_MEDIAN = 10.0  # rows of a table over the different rows of one batch
HEIGHT_SPREAD = 1.0  # of its natural logarithm
DIMS = (32, 64, 128)
_OWNER_ROWS = 2.0  # rows of a bin that a table owns at least, so that rare hot rows belong to few tables
_OWNER_ROOM = 4.0  # lookups of an owner over the counts of the bin
_ROUNDS = 300  # of proportional fitting, after which totals are within 1 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Published statistics of a batch of `batch_size` samples over all `tables`, and the seed of what is assumed."""

    tables: int
    batch_size: int
    lookups: float
    unique_rows: float
    row_shares: tuple[float, ...]
    access_shares: tuple[float, ...]
    seed: int


def synthesise_tables(recipe: Recipe, *, optimizer: str = "rowwise_adagrad") -> tuple[Table, ...]:
    """The tables of a recipe, the same for the same seed."""
    dealt, rows, sizes = _draw_tables(recipe)
    return tuple(
        Table(
            name=f"t{i}",
            rows=height,
            dim=dim,
            pooling=Pooling.from_constant(float(dealt[i].sum()) / recipe.batch_size),
            access=Reuse(_make_histogram(rows[i], dealt[i])),
            optimizer=optimizer,
        )
        for i, (height, dim) in enumerate(sizes)
    )


def list_table_sizes(recipe: Recipe) -> list[tuple[int, int]]:
    """Rows and columns of the tables of a recipe, without what is looked up in them."""
    return _draw_tables(recipe)[2]


def _draw_tables(recipe: Recipe) -> tuple[FloatArray, FloatArray, list[tuple[int, int]]]:
    """Lookups and rows that are looked up, by table and bin, and the size of every table."""
    random = Random(recipe.seed)
    total = ReuseHistogram(
        lookups=recipe.lookups,
        unique_rows=recipe.unique_rows,
        row_shares=tuple(recipe.row_shares),
        access_shares=tuple(recipe.access_shares),
        precision=0.001,
    )
    bin_rows, bin_lookups = total.compute_counts()
    lookups = np.exp(POOLING_SPREAD * _draw_scores(recipe.tables, random))
    lookups *= bin_lookups.sum() / lookups.sum()
    dealt = _distribute_lookups(lookups, bin_rows, bin_lookups, random)
    rows = dealt * (bin_rows / np.maximum(bin_lookups, 1e-300))
    height = HEIGHT_MEDIAN * np.exp(HEIGHT_SPREAD * _draw_scores(recipe.tables, random))
    dims = [DIMS[i % len(DIMS)] for i in range(recipe.tables)]
    random.shuffle(dims)
    heights = [ceil(max(float(height[i]), 1.0) * float(rows[i].sum())) for i in range(recipe.tables)]
    return dealt, rows, list(zip(heights, dims, strict=True))


def _distribute_lookups(
    lookups: FloatArray, bin_rows: FloatArray, bin_lookups: FloatArray, random: Random
) -> FloatArray:
    """Lookups by table and bin: sums over tables are `bin_lookups`, sums over bins nearly `lookups`."""
    hotness = HOTNESS_SPREAD * _draw_scores(len(lookups), random)
    octave = np.arange(len(bin_rows)) - 0.5 * len(bin_rows)
    dealt = lookups[:, None] * np.exp(hotness[:, None] * octave) * _choose_owners(lookups, bin_rows, random)
    for _ in range(_ROUNDS):
        dealt *= (lookups / dealt.sum(axis=1))[:, None]
        dealt *= bin_lookups / np.maximum(dealt.sum(axis=0), 1e-300)
    return dealt


def _choose_owners(lookups: FloatArray, bin_rows: FloatArray, random: Random) -> FloatArray:
    """1 where a table may own rows of a bin: it makes enough lookups, and the bin has rows enough for its owners."""
    owners = np.zeros((len(lookups), len(bin_rows)))
    for number, rows in enumerate(bin_rows):
        able = [int(i) for i in np.flatnonzero(lookups >= _OWNER_ROOM * (BIN_EDGES[number] + 1))]
        most = max(1, int(rows / _OWNER_ROWS))
        chosen = able if len(able) <= most else random.sample(able, most)
        owners[chosen or [int(np.argmax(lookups))], number] = 1.0
    return owners


def _make_histogram(rows: FloatArray, lookups: FloatArray) -> ReuseHistogram:
    return ReuseHistogram(
        lookups=float(lookups.sum()),
        unique_rows=float(rows.sum()),
        row_shares=tuple(float(share) for share in rows / rows.sum()),
        access_shares=tuple(float(share) for share in lookups / lookups.sum()),
    )


def _draw_scores(count: int, random: Random) -> FloatArray:
    """Evenly spaced quantiles of the standard normal distribution, shuffled."""
    scores = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    random.shuffle(scores)
    return np.array(scores)
