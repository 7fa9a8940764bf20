"""What every result can do besides: files by their ending, one table as a frame, bars."""

from __future__ import annotations

import json
import sys

import pytest

import traincast
from traincast.utils.errors import TraincastError


@pytest.fixture(scope="module")
def result():
    return traincast.predict("dlrm-ddp", on="v100", batch_size=64)


def test_a_result_is_saved_by_the_ending_of_its_file(result, tmp_path):
    assert json.loads(result.save(tmp_path / "step.json").read_text())["workload"] == "dlrm-ddp"
    header, first, *_ = result.save(tmp_path / "step.csv").read_text().splitlines()
    assert header == "family,ms"
    assert first.split(",")[0] == next(iter(result.by_family))
    assert result.save(tmp_path / "step.html").read_text().startswith("<!doctype html>")
    with pytest.raises(TraincastError, match=r"give a file that ends in \.json, \.csv or \.html"):
        result.save(tmp_path / "step.pdf")


def test_one_table_is_one_frame(result):
    pytest.importorskip("polars")
    assert result.to_polars().columns == ["family", "ms"]
    assert result.to_polars("ops")["ms"].sum() == pytest.approx(1e3 * sum(result.by_op.values()))
    with pytest.raises(TraincastError, match=r"unknown table 'opps'\. Did you mean ops"):
        result.to_polars("opps")


@pytest.mark.parametrize(("call", "missing", "remedy"), [
    ("to_pandas", "pandas", "pip install pandas"), ("plot", "matplotlib.pyplot", r"traincast\[plot\]"),
])  # fmt: skip
def test_a_library_that_is_not_there_is_named(result, monkeypatch, call, missing, remedy):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(TraincastError, match=remedy):
        getattr(result, call)()


def test_pandas_has_the_rows_of_a_table(result):
    pytest.importorskip("pandas")
    assert list(result.to_pandas("memory").columns) == ["kind", "gb"]


def test_a_plot_has_a_bar_for_each_of_the_largest_rows(result):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = result.plot()
    assert [bar.get_width() for bar in axes.patches][-1] == pytest.approx(1e3 * next(iter(result.by_family.values())))
