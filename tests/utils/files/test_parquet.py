"""The rows of a Parquet file are known before it is decoded; a footer that makes no sense is one line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from traincast.app.cli.main import main
from traincast.utils.errors import TraincastError
from traincast.utils.files import parquet
from traincast.utils.files.parquet import check_parquet_size, read_parquet

polars = pytest.importorskip("polars")


@pytest.fixture
def equal_values(tmp_path) -> Path:
    """A million equal numbers, which take no space."""
    path = tmp_path / "equal.parquet"
    column = polars.zeros(1_000_000, eager=True, dtype=polars.Int64).alias("x")
    polars.DataFrame([column]).write_parquet(path, row_group_size=250_000)
    assert path.stat().st_size < 100_000
    return path


def test_runs_of_equal_values_count_as_what_they_become(equal_values, monkeypatch):
    check_parquet_size(equal_values, "equal.parquet")
    monkeypatch.setattr(parquet, "PARQUET_BYTES", 7_999_999)
    with pytest.raises(
        TraincastError, match=r"'equal.parquet' unpacks to 0.0 GB; at most 0.0 GB are read: give a part"
    ):
        check_parquet_size(equal_values, "equal.parquet")


@pytest.mark.parametrize("file", ["lists.parquet", "t.yaml"])
def test_values_inside_of_lists_count(file, tmp_path, monkeypatch, capsys):
    """A file of a few kB may hold billions of them in one row."""
    polars.DataFrame({"name": [[0] * 100_000]}).write_parquet(tmp_path / "lists.parquet")
    (tmp_path / "t.yaml").write_text(
        "tables: [{name: a, rows: 10, dim: 4, access: {indices: lists.parquet, column: name, batch_size: 8}}]"
    )
    monkeypatch.setattr(parquet, "PARQUET_BYTES", 100_000)
    monkeypatch.setattr(parquet, "ROW_GROUP_VALUES", 99_999)
    assert main(["shard", str(tmp_path / file), "--on", "dgx-a100", "--gpus", "2"]) == 2
    said = capsys.readouterr().err
    assert "unpacks to" in said or "100000 values of column 'name' in one row group" in said


def test_texts_that_rows_share_count_for_each(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    polars.DataFrame({"name": ["x" * 1000] * 500}).write_parquet(path)
    assert path.stat().st_size < 5000
    assert read_parquet(path, "x").height == 500
    monkeypatch.setattr(parquet, "PARQUET_BYTES", 400_000)
    with pytest.raises(TraincastError, match="GB of text in its rows"):
        read_parquet(path, "x")


def test_rows_have_a_limit(equal_values, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_ROWS", 999_999)
    with pytest.raises(TraincastError, match="'it' has 1000000 rows; at most 999999 are read"):
        check_parquet_size(equal_values, "it")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 4 + b"PAR1", b"PAR1" + bytes(8) + b"PAR1"])
def test_what_is_no_parquet_file_is_one_line(tmp_path, content):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(TraincastError, match=r"x.parquet: it is no Parquet file"):
        check_parquet_size(path, "x.parquet")


def test_a_footer_with_odd_bytes_is_read_or_refused(equal_values):
    data = equal_values.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        changed = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            changed[len(data) - 8 - rng.randrange(1, size)] = rng.randrange(256)
        equal_values.write_bytes(changed)
        try:
            check_parquet_size(equal_values, "x")
        except TraincastError:
            refused += 1
    assert 0 < refused < 400


@pytest.mark.parametrize("nested", [b"\x4c", b"\x49\x19"])
def test_a_footer_nested_without_end_is_refused(tmp_path, nested):
    """Structs in structs, lists in lists."""
    footer = nested[:1] + nested[-1:] * 5000
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(TraincastError, match=r"x.parquet: it is no Parquet file"):
        check_parquet_size(path, "x.parquet")


def test_tables_and_indices_are_checked_before_they_are_read(equal_values, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parquet, "PARQUET_BYTES", 1000)
    (tmp_path / "t.yaml").write_text(
        "tables: [{name: a, rows: 10, dim: 4, access: {indices: equal.parquet, column: x, batch_size: 8}}]"
    )
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1" + bytes(8) + b"PAR1")
    (tmp_path / "d.yaml").write_text((tmp_path / "t.yaml").read_text().replace("equal", "damaged"))
    for tables, said in (("equal.parquet", "unpacks to"), ("d.yaml", "no Parquet file")):
        assert main(["shard", str(tmp_path / tables), "--on", "dgx-a100", "--gpus", "2"]) == 2
        assert said in capsys.readouterr().err
