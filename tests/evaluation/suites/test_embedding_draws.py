"""Streams of lookups drawn from laws and histograms, and counted exactly."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.models.embeddings.reuse import NUM_BINS, ReuseHistogram
from traincast_evaluation.suites import embedding_draws
from traincast_evaluation.suites.embedding_access import (
    Point,
    compute_drawn_points,
    compute_zipf_points,
    read_published_sets,
    round_histogram,
    summarise_access_points,
)
from traincast_evaluation.suites.embedding_draws import (
    THINNING,
    count_exactly,
    draw_beginning,
    draw_part,
    draw_zipf,
)
from traincast_evaluation.suites.embedding_locality import Locality


@pytest.fixture
def few_events(monkeypatch):
    """Counts of streams as short as these tests have are kept."""
    monkeypatch.setattr(embedding_draws, "FEWEST_EVENTS", 1)


def naive_hits(indices, cache):
    """Hits of an LRU cache that begins empty, by its definition."""
    held, hits = [], 0
    for index in indices:
        if index in held:
            hits += 1
            held.remove(index)
        held.append(index)
        del held[: max(0, len(held) - cache)]
    return hits


def locality(unique_rows=4000.0):
    """Half of the rows wanted once, half of them three or four times."""
    rows, lookups = np.zeros(NUM_BINS), np.zeros(NUM_BINS)
    rows[[0, 2]] = 0.5, 0.5
    lookups[[0, 2]] = 2 / 9, 7 / 9
    return Locality(
        batch_size=64, lookups=2.25 * unique_rows, unique_rows=unique_rows, row_shares=rows, access_shares=lookups
    )


def test_counts_are_those_of_a_naive_count(few_events):
    indices = np.random.default_rng(1).integers(0, 50, 2000)

    exact = count_exactly(indices)

    assert exact.lookups == 2000
    assert exact.unique_rows[2000] == len(np.unique(indices))
    assert exact.unique_rows[500] == np.mean([len(np.unique(part)) for part in indices.reshape(4, 500)])
    assert exact.hits[16] == naive_hits(indices.tolist(), 16)
    assert exact.hits[64] == 2000 - 50, "everything fits: only the first lookup of a row misses"


def test_too_few_events_are_not_counted():
    exact = count_exactly(np.zeros(100, dtype=np.int64))
    assert (exact.unique_rows, exact.hits) == ({}, {})


def test_a_zipf_law_is_drawn_in_its_proportions():
    indices = draw_zipf(1.0, 3, 60_000, np.random.default_rng(2))
    # 1, 1/2 and 1/3 of 11/6
    assert np.bincount(indices) / 60_000 == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)


def test_a_part_has_one_row_in_so_many_with_the_published_counts():
    indices = draw_part(locality(), 4, THINNING, np.random.default_rng(3))

    wanted = np.bincount(indices)
    assert set(wanted) <= {1, 3, 4}
    assert np.count_nonzero(wanted == 1) == 500
    assert len(indices) - 500 == pytest.approx(2.25 * 4000 * 7 / 9 / 4, abs=4), "within one row of the bin's lookups"


def test_the_beginning_of_a_batch_is_as_long_as_asked():
    indices = draw_beginning(locality(), 1000, THINNING, np.random.default_rng(4))

    assert len(indices) == 1000
    assert np.bincount(indices).max() <= 4


def test_the_same_seed_draws_the_same():
    first, second = (draw_part(locality(), 4, THINNING, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first, second)


def test_points_of_a_group_make_one_row_in_order_of_appearance():
    rows = summarise_access_points(
        [Point("b", "1", 11.0, 10.0), Point("a", "2", 9.0, 10.0), Point("b", "3", 8.0, 10.0)]
    )

    assert [(row.suite, row.group, row.n) for row in rows] == [
        ("embedding-access", "b", 2),
        ("embedding-access", "a", 1),
    ]
    assert (rows[0].worst, rows[0].worst_case) == (pytest.approx(-20.0), "3")


def test_draws_of_the_same_thing_are_also_judged_by_their_means(few_events, monkeypatch):
    monkeypatch.setattr("traincast_evaluation.suites.embedding_access._ONE_IN", 4)

    points = compute_drawn_points([(locality(), 1), (locality(), 2)], "made up", "published")

    single = [p for p in points if p.group == "published, exact shares, different rows"]
    means = [p for p in points if p.group == "published, exact shares, different rows, mean of draws"]
    assert len(single) == 2 * len(means)
    same = [p for p in single if p.name == means[0].name.removesuffix(", 2 draws")]
    assert means[0].exact == pytest.approx(np.mean([p.exact for p in same]))
    assert means[0].estimate == pytest.approx(np.mean([p.estimate for p in same]))


def test_estimates_of_a_zipf_table_are_near_the_counts(few_events):
    points = [p for p in compute_zipf_points(0.9, 1000, seed=7, lookups=100_000) if p.exact > 5000]

    assert {"Zipf, different rows", "Zipf, hits from empty"} & {p.group for p in points}
    assert all(abs(p.estimate / p.exact - 1) < 0.05 for p in points)


def test_a_histogram_is_rounded_to_three_decimals():
    shares = ReuseHistogram.from_counts(np.array([1, 1, 1, 2, 2, 7, 7]))

    short = round_histogram(shares)

    assert short.row_shares == tuple(round(share, 3) for share in shares.row_shares)
    assert (short.lookups, short.unique_rows, short.precision) == (shares.lookups, shares.unique_rows, 0.001)


def test_published_batches_are_told_apart_by_their_numbers(tmp_path):
    folder = tmp_path / "embedding_access"
    folder.mkdir()
    bins = [
        f"{{name}},{section},{number},share,{share}"
        for section in ("unique_rows_by_reuse", "accesses_by_reuse")
        for number, share in enumerate(locality().row_shares)
    ]
    figures = ["batch_size,64", "avg_num_indices,9000", "avg_num_unique_rows,4000"]
    lines = [*(f"{{name}},summary,,{figure}" for figure in figures), *bins]
    for year, names in (("2021", ["t856_0", "t856_1", "t856_bs65536"]), ("2022", ["t788_0"])):
        text = [line.format(name=name) for name in names for line in lines]
        (folder / f"locality_{year}.csv").write_text("\n".join(["dataset,section,bin,metric,value", *text]))

    sets = read_published_sets(tmp_path)

    assert {name: len(batches) for name, batches in sets.items()} == {"2021": 2, "2021 large": 1, "2022": 1}
    assert (sets["2022"][0].lookups, sets["2022"][0].batch_size) == (9000.0, 64)
