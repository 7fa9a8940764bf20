from __future__ import annotations

import numpy as np
import pytest

from traincast.models.embeddings import (
    MemoryLevel,
    Pooling,
    Reuse,
    Table,
    Uniform,
    Zipf,
    check_tables,
    compute_bytes_by_level,
)
from traincast.models.embeddings.access import format_access, parse_access
from traincast.models.embeddings.reuse import ReuseHistogram
from traincast.models.embeddings.table import MAX_TABLES
from traincast.utils.errors import TraincastError


def _table(**changes):
    fields = {"name": "user", "rows": 10_000, "dim": 64, "pooling": Pooling.from_constant(20), "access": Zipf(1.0)}
    return Table(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "no name"),
        ({"rows": 0}, "table 'user': rows 0"),
        ({"rows": 1 << 35}, "table 'user': rows"),
        ({"dim": 0}, "table 'user': dim 0; give a number from 1"),
        ({"dim": -4}, "table 'user': dim -4"),
        ({"dtype": "fp23"}, "unknown dtype 'fp23'.*fp32.*'user'"),
        ({"optimizer": "lamb"}, "unknown optimizer 'lamb'.*'user'"),
    ],
)
def test_a_wrong_table_is_refused_by_name(changes, message):
    with pytest.raises(TraincastError, match=message):
        _table(**changes)


def test_a_table_lower_than_its_batches_is_refused():
    seen = Reuse(ReuseHistogram.from_counts(np.ones(50, dtype=np.int64)))
    with pytest.raises(TraincastError, match="table 'user': its batches touch 50 different rows, but it has 49"):
        _table(rows=49, access=seen)


def test_a_name_twice_is_refused():
    with pytest.raises(TraincastError, match="table 'user' appears 2 times"):
        check_tables([_table(), _table(name="item"), _table(dim=8)])
    with pytest.raises(TraincastError, match="no tables"):
        check_tables([])


@pytest.mark.parametrize("length", [-1, float("nan"), float("inf"), 1 << 21])
def test_a_wrong_pooling_is_refused(length):
    with pytest.raises(TraincastError, match="pooling"):
        Pooling.from_constant(length)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.2), (1.5, -0.5)])
def test_wrong_pooling_shares_are_refused(shares):
    with pytest.raises(TraincastError, match="shares"):
        Pooling((1.0, 2.0), shares)


def test_memory_counts_optimizer_state_in_fp32():
    assert _table(optimizer="sgd").memory_bytes == 10_000 * 256
    assert _table(optimizer="adagrad", dtype="fp16").memory_bytes == 10_000 * (128 + 256)
    assert _table(optimizer="rowwise_adagrad").memory_bytes == 10_000 * (256 + 4)
    assert _table(optimizer="adam").memory_bytes == 10_000 * (256 + 512)


def test_lookups_unique_rows_and_duplicates_add_up():
    table = _table(pooling=Pooling((0.0, 10.0, 30.0), (0.5, 0.25, 0.25)))
    assert table.count_lookups(1000) == 10_000
    assert table.count_unique_rows(1000) + table.count_duplicates(1000) == pytest.approx(10_000)
    assert table.count_unique_rows(1000) < _table(access=Uniform(), pooling=table.pooling).count_unique_rows(1000)


def test_a_batch_never_touches_more_rows_than_there_are():
    seen = Reuse(ReuseHistogram.from_counts(np.ones(50, dtype=np.int64)))
    assert _table(rows=50, access=seen).count_unique_rows(10**6) <= 50


def test_a_cache_for_the_whole_table_misses_first_touches_only():
    table = _table()
    assert table.compute_hit_rate(10_000, 100) == pytest.approx(table.count_duplicates(100) / table.count_lookups(100))
    assert table.compute_hit_rate(10_000) == 1.0
    assert _table(pooling=Pooling.from_constant(0)).compute_hit_rate(10, 100) == 0.0


def test_levels_share_out_all_lookups_and_updates():
    table = _table(optimizer="adagrad")
    levels = (MemoryLevel("l2", 500 * 256), MemoryLevel("device", 4000 * 256, kept=True), MemoryLevel("host", 1e12))
    parts = compute_bytes_by_level(table, 512, levels)
    assert [part.name for part in parts] == ["l2", "device", "host"]
    assert all(part.lookup_bytes > 0 for part in parts)
    assert sum(part.lookup_bytes for part in parts) == pytest.approx(table.count_lookups(512) * 256)
    assert sum(part.update_bytes for part in parts) == pytest.approx(2 * table.count_unique_rows(512) * (256 + 256))
    assert parts[0].lookup_bytes == pytest.approx(table.compute_hit_rate(500, 512) * table.count_lookups(512) * 256)


def test_short_rows_move_whole_sectors():
    (part,) = compute_bytes_by_level(_table(dim=3), 16, [MemoryLevel("device", 1e9)])
    assert part.lookup_bytes == pytest.approx(16 * 20 * 32)


def test_a_table_that_fits_nowhere_is_refused_by_name():
    with pytest.raises(TraincastError, match=r"table 'user'.*do not fit"):
        compute_bytes_by_level(_table(), 16, [MemoryLevel("device", 1000)])


@pytest.mark.parametrize(
    "access",
    [Uniform(), Zipf(1.05), Zipf(1 / 3), Reuse(ReuseHistogram.from_counts(np.array([1, 1, 2, 3, 9, 70_000])))],
    ids=["uniform", "zipf", "third", "histogram"],
)
def test_an_access_is_what_its_text_says(access):
    assert parse_access(format_access(access)) == access


@pytest.mark.parametrize("text", ["reuse:", "reuse:1,2", "reuse:1,1,0,x", "reuse:" + "1," * 9000, "uniform:1", "zipf:"])
def test_a_wrong_access_text_is_refused_on_one_short_line(text):
    with pytest.raises(TraincastError) as caught:
        parse_access(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda table: table.count_unique_rows(-1), "batch of -1 samples"),
        (lambda table: table.compute_hit_rate(float("nan")), "a cache of nan rows"),
        (lambda table: table.compute_hit_rate(-5, 10), "a cache of -5 rows"),
        (lambda table: compute_bytes_by_level(table, 8, [MemoryLevel("l2", float("nan"))]), "'l2': nan bytes"),
    ],
)
def test_a_question_without_an_answer_is_refused(ask, message):
    with pytest.raises(TraincastError, match=message):
        ask(_table())


def test_an_empty_cache_and_an_empty_batch_have_answers():
    assert _table().compute_hit_rate(0) == pytest.approx(0, abs=1e-6)
    assert _table().count_unique_rows(0) == _table().compute_hit_rate(100, 0) == 0


def test_a_set_of_very_many_tables_is_refused():
    tables = [Table(name=f"t{i}", rows=10, dim=4, pooling=Pooling.from_constant(1)) for i in range(MAX_TABLES + 1)]
    assert len(check_tables(tables[:-1])) == MAX_TABLES
    with pytest.raises(TraincastError, match="2049 tables; give at most 2048"):
        check_tables(tables)
