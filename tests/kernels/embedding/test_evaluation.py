"""Embedding kernels against those measured, on rows that no rate was fitted to."""

from __future__ import annotations

from traincast.kernels.embedding.evaluation import evaluate_embedding


def test_held_out_embedding_kernels_above_fifty_microseconds_are_within_ten_percent(shared_data):
    rows = {(row.suite, row.group): row for row in evaluate_embedding(shared_data)}

    together = rows["embedding: held out", "all above 50 us"]
    assert together.n == 25
    assert together.gmae < 4
    assert abs(together.bias) < 4
    assert together.covered is not None and together.covered >= 80  # of 25 rows
    new = rows["embedding: held out", "all above 50 us, no further steps of a fitted job"]
    assert (new.n, new.gmae < 5) == (13, True)
    held = {group: row for (suite, group), row in rows.items() if suite == "embedding: held out"}
    assert {group: row.n for group, row in held.items() if "above" in group and row not in (together, new)} == {
        "FBGEMM lookup, A100, above 50 us": 4,
        "FBGEMM lookup, V100, above 50 us": 1,
        "FBGEMM update, A100, above 50 us": 8,
        "table-batched, V100, above 50 us": 12,
    }
    assert held["FBGEMM update, V100, below 50 us"].mape < 20


def test_fitted_rows_are_shown_apart_and_every_row_once(shared_data):
    rows = [row for row in evaluate_embedding(shared_data) if not row.group.startswith("all")]
    counts = {suite: sum(row.n for row in rows if row.suite == suite) for suite in {row.suite for row in rows}}
    assert counts == {"embedding: held out": 44, "embedding: fitted": 24}
    assert all(row.covered is None for row in rows if row.suite == "embedding: fitted")
