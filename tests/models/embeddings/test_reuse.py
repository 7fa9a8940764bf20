from __future__ import annotations

import numpy as np
import pytest

from traincast.models.embeddings.reuse import NUM_BINS, HotBin, ReuseHistogram
from traincast.utils.errors import TraincastError


def _shares(*values):
    return (*values, *(0.0,) * (NUM_BINS - len(values)))


def test_counts_fall_into_half_open_bins():
    histogram = ReuseHistogram.from_counts(np.array([1, 1, 2, 3, 4, 5, 0, 32768, 32769]))
    assert histogram.unique_rows == 8
    assert histogram.lookups == 1 + 1 + 2 + 3 + 4 + 5 + 32768 + 32769
    assert np.array(histogram.row_shares) * 8 == pytest.approx(_shares(2, 1, 2, 1, *(0,) * 11, 1, 1))
    assert histogram.access_shares[2] * histogram.lookups == pytest.approx(7)


def test_exact_shares_give_back_rows_and_lookups():
    counts = np.random.default_rng(0).zipf(1.5, 5000) % 60_000 + 1
    histogram = ReuseHistogram.from_counts(counts)
    rows, lookups = histogram.compute_counts()
    assert rows.sum() == pytest.approx(5000)
    assert lookups.sum() == pytest.approx(counts.sum())


def test_rounded_shares_keep_bin_means_within_their_bins():
    histogram = ReuseHistogram(
        lookups=1e6, unique_rows=2e5, precision=0.001,
        row_shares=_shares(0.7, 0.2, 0.08, 0.02), access_shares=_shares(0.14, 0.08, 0.056, 0.024, *(0,) * 10, 0.7),
    )  # fmt: skip
    rows, lookups = histogram.compute_counts()
    assert rows[14] > 0  # its share of rows rounds to nothing, its share of lookups does not
    assert 8192 < lookups[14] / rows[14] <= 16384


def test_popularities_explain_the_batch_they_came_from():
    """Given a table with popular and rare rows, when one batch is counted, then its classes show that batch again."""
    rng = np.random.default_rng(1)
    rate = np.concatenate([np.full(20_000, 0.2), np.full(2000, 6.0), np.full(20, 3000.0)])
    counts = rng.poisson(rate)
    classes = ReuseHistogram.from_counts(counts).make_classes(len(rate))
    assert classes.count_unique_rows(counts.sum()) == pytest.approx((counts > 0).sum(), rel=0.01)
    rows, _ = classes.compute_reuse(counts.sum())
    assert rows[0] == pytest.approx((counts == 1).sum(), rel=0.03)


def test_a_larger_batch_is_extrapolated_from_the_rows_still_unseen():
    rate = np.concatenate([np.full(20_000, 0.2), np.full(2000, 6.0), np.full(20, 3000.0)])
    counts = np.random.default_rng(1).poisson(rate)
    classes = ReuseHistogram.from_counts(counts).make_classes(len(rate))
    expected = (1 - np.exp(-4 * rate)).sum()
    assert classes.count_unique_rows(4 * counts.sum()) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"unique_rows": 0}, "unique_rows 0"),
        ({"unique_rows": 11}, "unique_rows 11"),
        ({"row_shares": (1.0,)}, "row_shares has 1 bins; give 17"),
        ({"access_shares": _shares(0.5)}, "access_shares must be shares"),
        ({"row_shares": _shares(1.5, -0.5)}, "row_shares must be shares"),
        ({"row_shares": _shares(float("nan"))}, "row_shares must be shares"),
        ({"lookups": float("inf")}, "lookups inf, which must be finite"),
        ({"precision": float("nan")}, "precision nan"),
        ({"precision": 0.5}, "precision 0.5"),
        ({"access_shares": _shares(0.0, 1.0)}, "rows of bin 1 are accessed 0 times each.*the bin is 1 to 1"),
        (
            {"lookups": 30, "row_shares": _shares(0.0, 1.0), "access_shares": _shares(0.0, 1.0)},
            "bin 2 are accessed 3 times",
        ),
    ],
)
def test_a_wrong_histogram_is_refused(wrong, message):
    right = {"lookups": 10, "unique_rows": 10, "row_shares": _shares(1.0), "access_shares": _shares(1.0)}
    with pytest.raises(TraincastError, match=message):
        ReuseHistogram(**{**right, **wrong})


def test_a_batch_without_lookups_has_no_histogram():
    with pytest.raises(TraincastError, match="no lookups"):
        ReuseHistogram.from_counts(np.zeros(3, dtype=np.int64))


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_few_hot_rows_are_whole_and_share_their_lookups(number):
    """Given a bin whose rows round to nothing, then it keeps its lookups and has enough."""
    hot = HotBin(lower=1024, upper=2048, rows=1.3, lookups=2040.0 * number, fewest=0, most=50, blur=1e-6)
    rows, counts = hot.make_classes()
    assert rows @ counts == pytest.approx(2040 * number)
    assert rows.sum() >= number
    assert counts.min() >= 1024 and counts.max() <= 2048
    if number == 1:
        assert counts == pytest.approx([2040, 2040])


def test_several_numbers_of_hot_rows_are_weighed():
    """Given 3000 lookups of rows accessed 1025 to 2048 times, then they are those of two rows, never one or three."""
    rows, _ = HotBin(lower=1024, upper=2048, rows=2.1, lookups=3000, fewest=0, most=50, blur=30).make_classes()
    assert rows.sum() == 2
    rows, _ = HotBin(lower=1024, upper=2048, rows=6.0, lookups=8600, fewest=0, most=50, blur=30).make_classes()
    assert 5 < rows.sum() < 7 and rows.sum() != pytest.approx(6, abs=1e-3)
