"""Promise: what is written opens as what it is: no cell is a formula, no figure that no point can have."""

from __future__ import annotations

import pytest

from traincast.planner.what_if.sweeps.points import FIGURES
from traincast.planner.what_if.sweeps.run import _is_row, _list_named_files
from traincast.utils.results import encode_csv

TRIES = 18
"""Cells and rows."""


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_text_that_a_spreadsheet_would_compute_is_quoted(cell):
    assert encode_csv([{"name": cell}]).decode().split("\n", 1)[1].strip('"').startswith("'")


@pytest.mark.parametrize("cell", ["-1", "+2.5", "-1e-3", "plain", "a=b", -5.0])
def test_numbers_and_plain_text_stay_as_they_are(cell):
    assert encode_csv([{"name": cell}]).decode() == f"name\n{cell}\n"


@pytest.mark.parametrize("wrong", [-5.0, float("inf"), float("nan"), "7", [1.0]])
def test_a_row_of_a_journal_with_an_impossible_figure_is_not_taken(wrong):
    row = dict.fromkeys(FIGURES, 1.0) | {"fits": True, "dollars_per_million_samples": None}
    assert _is_row(row)
    assert not _is_row(row | {"iteration_ms": wrong})


def test_raw_indices_that_a_description_names_are_part_of_a_sweep(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(
        "access: [{indices: a.npy, batch_size: 8}, uniform, {indices: b.parquet, column: x}]\nbatch_size: 4\n"
    )
    assert _list_named_files(str(path)) == [str(tmp_path / "a.npy"), str(tmp_path / "b.parquet")]
    assert _list_named_files("dlrm-default") == []
