"""Estimates within 3 % of exact counts, wherever a count is exact enough to tell."""

from __future__ import annotations

import pytest

from traincast.evaluate.embedding_access import PUBLISHED, error_rows, published_points, zipf_points
from traincast.fit.embedding_sets import read_locality


@pytest.mark.parametrize("exponent", [0.6, 0.8, 1.0, 1.2, 1.4])
@pytest.mark.parametrize("rows", [10_000, 1_000_000])
def test_zipf_within_three_percent(exponent, rows):
    rows_of_errors = error_rows(zipf_points(exponent, rows, seed=17, lookups=400_000))
    assert sum(row.n for row in rows_of_errors) >= 10
    for row in rows_of_errors:
        limit = (
            5 if row.group.startswith("histogram") else 3
        )  # that of 100,000 lookups, extrapolated to four times as many
        assert abs(row.worst) < limit, row


@pytest.mark.parametrize(("file", "name"), PUBLISHED, ids=[name for _, name in PUBLISHED])
def test_published_histograms_within_three_percent(shared_data, file, name):
    published = read_locality(shared_data / "embedding_access" / file)[name]
    rows_of_errors = error_rows(published_points(published, name, seed=17))
    assert len(rows_of_errors) == 6
    for row in rows_of_errors:
        limit = 6 if "three decimals" in row.group and "below" in row.group else 3
        assert abs(row.worst) < limit, row
