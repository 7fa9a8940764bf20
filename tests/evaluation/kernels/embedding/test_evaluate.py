"""Embedding kernels against those measured, on rows that no rate was fitted to."""

from __future__ import annotations

from traincast_evaluation.kernels.embedding.evaluate import HELD_BACK, evaluate_embedding


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
    rows = [row for row in evaluate_embedding(shared_data) if row.group[:4] != "all "]
    counts = {suite: sum(row.n for row in rows if row.suite == suite) for suite in {row.suite for row in rows}}
    assert counts == {
        "embedding: held out": 38, "embedding: fitted": 30, HELD_BACK: 116, "whole lookups: fitted": 190,
    }  # fmt: skip
    assert all(row.covered is None for row in rows if row.suite.endswith("fitted"))


def test_lookups_of_configurations_held_back_are_within_the_bars(shared_data):
    rows = {(row.suite, row.group): row for row in evaluate_embedding(shared_data)}
    device, links = rows[HELD_BACK, "all in HBM"], rows[HELD_BACK, "all in UVM, caches and over links"]
    assert (device.n, device.gmae < 8, device.mape < 12) == (30, True, True)
    assert (links.n, links.mape < 15) == (86, True)
    assert rows[HELD_BACK, "FBGEMM lookup, UVM, H100"].mape < 5
    below = [rows["embedding: held out", f"FBGEMM lookup, {gpu}, below 50 us"] for gpu in ("A100", "V100")]
    assert sum(row.n * row.mape for row in below) / sum(row.n for row in below) < 15
