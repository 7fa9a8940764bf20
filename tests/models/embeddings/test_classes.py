from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from traincast.models.embeddings.access import Uniform, Zipf, parse_access
from traincast.models.embeddings.reuse import NUM_BINS, RowClasses, compute_bin_shares, compute_poisson_cdf
from traincast.utils.errors import TraincastError


def test_uniform_rows_follow_the_closed_form():
    classes = Uniform().make_classes(1000)
    assert classes.count_unique_rows(500) == pytest.approx(1000 * (1 - (1 - 1 / 1000) ** 500))
    assert classes.compute_steady_hit_rate(250) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.4, 3.0])
@pytest.mark.parametrize("rows", [1, 7, 256, 257, 100_000])
def test_zipf_classes_equal_the_sum_over_single_rows(exponent, rows):
    weight = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    single = RowClasses.from_weights(np.ones(rows), weight)
    classes = Zipf(exponent).make_classes(rows)
    assert classes.rows.sum() == rows
    for lookups in (1, 100, 30_000):
        assert classes.count_unique_rows(lookups) == pytest.approx(single.count_unique_rows(lookups), rel=2e-4)
    if rows > 100:
        assert classes.count_hits(rows // 10, 30_000) == pytest.approx(single.count_hits(rows // 10, 30_000), rel=2e-4)


def test_forty_million_rows_are_a_few_hundred_classes():
    tracemalloc.start()
    try:
        classes = Zipf(1.05).make_classes(40_000_000)
        unique, hits = classes.count_unique_rows(1e6), classes.count_hits(1e5, 1e6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(classes.rows) < 3000 and peak < 1 << 20, "nothing is made that is as long as the table"
    assert 0 < hits < 1e6 - unique


def test_a_cache_for_all_rows_hits_every_repeat():
    classes = Zipf(0.8).make_classes(500)
    assert classes.compute_cache_window(500) == math.inf
    assert classes.count_hits(500, 2000) == pytest.approx(2000 - classes.count_unique_rows(2000))
    assert classes.compute_steady_hit_rate(500) == 1.0


def test_hits_grow_with_the_cache_and_with_skew():
    caches = (1, 10, 100, 1000, 10_000)
    hits = [Zipf(1.0).make_classes(20_000).count_hits(cache, 1e5) for cache in caches]
    skewed = [Zipf(1.2).make_classes(20_000).count_hits(cache, 1e5) for cache in caches]
    assert hits == sorted(hits)
    assert all(more > less for more, less in zip(skewed, hits, strict=True))


def test_poisson_distribution_against_its_definition():
    means = np.array([0.0, 0.3, 4.0, 60.0, 120.0, 5000.0])
    for count in (0, 1, 16, 64, 128, 4096):
        exact = [
            sum(math.exp(k * math.log(m) - m - math.lgamma(k + 1)) if m else float(k == 0) for k in range(count + 1))
            for m in means
        ]
        assert compute_poisson_cdf(count, means) == pytest.approx(exact, abs=2e-4)
    assert compute_poisson_cdf(-1, means).tolist() == [0.0] * 6
    assert compute_poisson_cdf(None, means).tolist() == [1.0] * 6


def test_bins_share_out_all_counts():
    means = np.array([0.5, 3.0, 700.0, 1e6])
    rows, accesses = compute_bin_shares(means)
    assert rows.shape == (NUM_BINS, 4)
    assert rows.sum(axis=0) == pytest.approx(1 - np.exp(-means))
    assert accesses.sum(axis=0) == pytest.approx(means)


@pytest.mark.parametrize(
    "text", ["zipf", "zipf:", "zipf:much", "zipf:-1", "zipf:nan", "zipf:11", "pareto:1", "uniform:2"]
)
def test_a_wrong_access_is_refused(text):
    with pytest.raises(TraincastError, match="give"):
        parse_access(text)


def test_access_texts():
    assert parse_access("uniform") == Uniform()
    assert parse_access(" zipf:1.05 ") == Zipf(1.05)
