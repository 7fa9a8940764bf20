from __future__ import annotations

import numpy as np
import pytest

from traincast.models.embeddings import Reuse, Uniform, Zipf, load_tables
from traincast.utils.errors import TraincastError

YAML = """
tables:
  - {name: user, rows: 1000000, dim: 64, pooling: 20, access: "zipf:1.05", dtype: fp16, weighted: true, optimizer: adam}
  - {name: item, rows: 5e3, dim: 16}
  - name: words
    rows: 100
    dim: 8
    pooling: {lengths: [0, 8], shares: [0.25, 0.75]}
    access:
      reuse:
        lookups: 40
        unique_rows: 30
        row_shares: [0.6666667, 0.3333333, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        access_shares: [0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
"""


def _write(tmp_path, text, name="tables.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml(tmp_path):
    user, item, words = load_tables(_write(tmp_path, YAML))
    assert (user.rows, user.dim, user.pooling.mean, user.access) == (1_000_000, 64, 20, Zipf(1.05))
    assert (user.dtype, user.weighted, user.optimizer) == ("fp16", True, "adam")
    assert (item.rows, item.pooling.mean, item.access, item.weighted) == (5000, 1, Uniform(), False)
    assert words.pooling.mean == 6
    assert isinstance(words.access, Reuse)


def test_csv_and_parquet_say_the_same(tmp_path):
    pl = pytest.importorskip("polars")
    text = "name,rows,dim,pooling,access,weighted\nuser,1000,64,2.5,zipf:0.9,true\nitem,7,32,,,\n"
    from_csv = load_tables(_write(tmp_path, text, "tables.csv"))
    pl.read_csv(tmp_path / "tables.csv").write_parquet(tmp_path / "tables.parquet")
    assert load_tables(tmp_path / "tables.parquet") == from_csv
    assert from_csv[0].access == Zipf(0.9)
    assert from_csv[1].pooling.mean == 1


def test_distributions_from_raw_indices(tmp_path):
    indices = np.random.default_rng(0).zipf(1.4, 5000) % 900
    np.savez(tmp_path / "raw.npz", indices=indices, lengths=np.full(500, 10))
    path = _write(tmp_path, "tables: [{name: a, rows: 900, dim: 4, access: {indices: raw.npz, batch_size: 100}}]")
    (table,) = load_tables(path)
    exact = np.mean([len(np.unique(batch)) for batch in indices.reshape(5, 1000)])
    assert table.pooling.mean == 10
    assert table.count_unique_rows(100) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("{indices: raw.npz}", "index 7 is outside the table .batch 1, lookup 2.; row numbers run from 0 to 4"),
        ("{indices: raw.npz, column: a}", "give a .npz file"),
        ("{indices: raw.npz, batchsize: 3}", "unknown field 'batchsize'. Did you mean batch_size"),
        ("{indices: raw.npz, table: 1}", "no table 1"),
        ("{indices: raw.npz, batch_size: 0}", "batch_size 0"),
        ("{indices: bags.parquet, column: user, table: 0, batch_size: 2}", "give a .npz file"),
    ],
)
def test_wrong_raw_indices_are_refused_by_table_and_file(tmp_path, access, message):
    np.savez(tmp_path / "raw.npz", indices=np.array([1, 2, 7]), lengths=[3])
    (tmp_path / "bags.parquet").write_bytes(b"")
    path = _write(tmp_path, f"tables: [{{name: user, rows: 5, dim: 4, access: {access}}}]")
    with pytest.raises(TraincastError, match=f"tables.yaml: table 'user': .*{message}"):
        load_tables(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tables: [{name: a, rows: 10, dim: 0}]", "table 'a': dim 0"),
        ("tables: [{name: a, rows: 10, dim: 2.5}]", "table 'a': dim 2.5; give an integer"),
        ("tables: [{name: a, rows: .nan, dim: 2}]", "'rows' is nan"),
        ("tables: [{name: a, rows: true, dim: 2}]", "table 'a': rows True; give a number"),
        ("tables: [{name: a, rows: 10, dim: 2, pooling: -1}]", "table 'a': pooling -1"),
        ("tables: [{name: a, rows: 10, dim: 2, pooling: [1]}]", r"table 'a': pooling \[1\]"),
        ("tables: [{name: a, rows: 10, dim: 2, pooling: {lengths: 1}}]", "table 'a': pooling: give a number"),
        ("tables: [{name: a, rows: 10, dim: 2}, {name: a, rows: 9, dim: 4}]", "table 'a' appears 2 times"),
        ("modules: [a]", "give names with the `tables` of each"),
        ("tables: [{name: a, dim: 2}]", "table 'a': no rows"),
        ("tables: [{name: a, rows: 10, dim: 2, pool: 3}]", "unknown field 'pool'.*pooling.*table 'a'"),
        ("tables: [{name: a, rows: 10, dim: 2, weighted: perhaps}]", "weighted 'perhaps'"),
        ("tables: [{name: a, rows: 10, dim: 2, access: {zipf: 1}}]", "access with zipf"),
        ("tables: [{name: a, rows: 10, dim: 2, access: 3}]", "access 3"),
        ("tables: [{name: a, rows: 10, dim: 2, access: {reuse: {lookups: 3}}}]", "access reuse: give lookups"),
        ("tables: [{name: a, rows: 10, dim: 2, access: {indices: none.npz}}]", "no file"),
        ("tables: [{name: [a], rows: 10, dim: 2}]", r"table 1: name \['a'\]; give a printable word"),
        ('tables: [{name: "a\\nb", rows: 10, dim: 2}]', "table 1: name 'a.*give a printable word"),
        ("tables: [a]", "table 1: give a mapping"),
        ("tables: []", "no tables"),
        ("tables: {}", "give `tables` with a list"),
        ("[1, 2]", "table 1: give a mapping"),
        ("tables: [{name: a, rows: 10, num_embeddings: 10, dim: 2}]", "num_embeddings and another field both say"),
        ("tables: [{name: a, rows: 10, dim: 2, feature_names: [a, b]}]", "the one that the table serves"),
        ("tables: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    path = _write(tmp_path, text)
    with pytest.raises(TraincastError, match=message) as caught:
        load_tables(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_set_is_refused():
    with pytest.raises(TraincastError, match=r"unknown table set 'dlrm-2021'. Did you mean dlrm-2021-856"):
        load_tables("dlrm-2021")
    with pytest.raises(TraincastError, match="cannot be read"):
        load_tables("nowhere/tables.yaml")


def test_a_broken_parquet_file_is_refused(tmp_path):
    pytest.importorskip("polars")
    with pytest.raises(TraincastError, match="it is no Parquet file"):
        load_tables(_write(tmp_path, "no parquet", "tables.parquet"))


def test_raw_indices_outside_the_folder_of_the_tables_are_refused(tmp_path):
    np.savez(tmp_path / "raw.npz", indices=np.array([1, 2, 3]), lengths=[3])
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link.npz").symlink_to(tmp_path / "raw.npz")
    for place in ("../raw.npz", str(tmp_path / "raw.npz"), "link.npz", "x/../../raw.npz", "a\\0b.npz"):
        path = _write(inner, f'tables: [{{name: a, rows: 5, dim: 4, access: {{indices: "{place}"}}}}]')
        with pytest.raises(TraincastError, match="outside the folder"):
            load_tables(path)
    (inner / "below").mkdir()
    np.savez(inner / "below" / "raw.npz", indices=np.array([1, 2, 3]), lengths=[3])
    assert load_tables(_write(inner, "tables: [{name: a, rows: 5, dim: 4, access: {indices: below/raw.npz}}]"))


FORMS = {
    "sizes.json": '{"items": 40, "ad.id": 7}',
    "named.yaml": "dim: 128\ntables: {items: 40, ad.id: 7}",
    "fields.yaml": "tables: {items: {rows: 40, dim: 128}, ad.id: {num_embeddings: 7, embedding_dim: 128}}",
    "list.json": '[{"name": "items", "num_embeddings": 40, "embedding_dim": 128, "pooling": "SUM"},'
    ' {"name": "ad.id", "rows": 7, "dim": 128, "pooling_factors": [1.0]}]',
    "ours.json": '{"tables": [{"name": "items", "rows": 40, "dim": 128}, {"name": "ad.id", "rows": 7, "dim": 128}]}',
    "modules.json": '{"modules": {"m": {"is_weighted": false, "tables": [{"name": "items", "num_embeddings": 40,'
    ' "embedding_dim": 128, "data_type": "DataType.FP32", "feature_names": ["f"]}, {"name": "ad.id",'
    ' "num_embeddings": 7, "embedding_dim": 128}]}}}',
    "tables.csv": "name,num_embeddings,embedding_dim\nitems,40,128\nad.id,7,128\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_describes_the_same_tables(tmp_path, name):
    (tmp_path / name).write_text(FORMS[name])
    tables = load_tables(tmp_path / name)
    assert [(t.name, t.rows, t.dim, t.pooling.mean, t.dtype, t.weighted) for t in tables] == [
        ("items", 40, 128, 1.0, "fp32", False),
        ("ad.id", 7, 128, 1.0, "fp32", False),
    ]
