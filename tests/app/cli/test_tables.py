"""Tables of a result as files."""

from __future__ import annotations

import polars as pl
import pytest

from tests.traces.timelines import small_events, write_trace
from traincast.app.cli.main import main


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_of_a_trace_as_files(tmp_path, capsys, kind):
    path = write_trace(tmp_path / "t.json", small_events())
    tables = tmp_path / "tables"
    tables.mkdir()
    assert main(["trace", str(path), "--tables-out", str(tables), "--tables-format", kind]) == 0
    capsys.readouterr()
    read = pl.read_csv if kind == "csv" else pl.read_parquet
    rates = read(tables / f"rates.{kind}")
    assert rates["op"].to_list() == ["aten::mm", "aten::add"]
    assert not (tables / f"memory.{kind}").exists()  # none was recorded


def test_a_folder_that_is_not_there_is_refused_before_any_work(tmp_path, capsys):
    assert main(["trace", "no-such-trace.json", "--tables-out", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("top", ["0", "-3", "many", "1000000000"])
def test_a_number_of_rows_that_makes_no_sense_is_refused(capsys, top):
    assert main(["trace", "t.json", "--top", top]) == 2
    assert "--top" in capsys.readouterr().err
