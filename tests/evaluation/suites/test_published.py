"""Published tables are read by name of column, and complained about by file, row and column."""

from __future__ import annotations

import pytest

from tests.evaluation.suites.folders import write_rows
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.published import Row, read_rows

ROW = Row("table.csv", 3, {"ms": "4.5", "error": "-6.9", "gpus": "8", "model": "small", "empty": "", "half": "1.5"})


def test_cells_are_text_numbers_counts_and_names():
    assert ROW["model"] == "small"
    assert ROW.positive("ms") == 4.5
    assert ROW.signed("error") == -6.9
    assert ROW.count("gpus") == 8
    assert ROW.known("model", {"small": 1, "large": 2}) == 1


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda row: row["ns"], "'table.csv' has no column 'ns'; it has ms, error"),
        (lambda row: row.positive("error"), "'table.csv', row 3, column 'error': '-6.9' is not a number above 0"),
        (lambda row: row.positive("empty"), "column 'empty': '' is not a number"),
        (lambda row: row.signed("model"), "column 'model': 'small' is not a number"),
        (lambda row: row.count("half"), "column 'half': '1.5' is not an integer"),
        (lambda row: row.known("model", {"smal": 1}), "unknown model 'small'. Did you mean smal? It stands in"),
        (lambda row: row.known("model", {"x": 1}), "'table.csv', row 3; known are x."),
    ],
)
def test_a_wrong_cell_is_named(ask, message):
    with pytest.raises(TraincastError) as caught:
        ask(ROW)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused(text):
    with pytest.raises(TraincastError, match="not a finite number"):
        Row("t.csv", 1, {"ms": text}).positive("ms")


def test_rows_are_counted_without_the_header(tmp_path):
    rows = read_rows(write_rows(tmp_path, "steps", {"ms": "1"}, {"ms": "2"}) / "iterations" / "steps.csv")
    assert [(row.file, row.number, row.positive("ms")) for row in rows] == [
        ("steps.csv", 1, 1.0),
        ("steps.csv", 2, 2.0),
    ]


def test_a_missing_file_says_where_to_point(tmp_path):
    with pytest.raises(TraincastError, match=r"nothing\.csv' is missing; point `data` at the folder"):
        read_rows(tmp_path / "nothing.csv")
