"""What a batch asks of tables, as sums."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.models.embeddings import Pooling, Table, Uniform, Zipf
from traincast.models.embeddings.table import (
    CACHE_BYTES,
    FIELDS,
    LONG_RUN,
    Part,
    compute_part_load,
    compute_table_load,
    count_fetched_rows,
    count_hottest_row_lookups,
    find_longest_bag,
    total_load,
)

BATCH = 2048
SKEWED = Zipf(1.05)


def table(name: str = "t", rows: int = 1_000_000, dim: int = 64, pooling: float = 50, access=SKEWED, **more) -> Table:
    return Table(name=name, rows=rows, dim=dim, pooling=Pooling.from_constant(pooling), access=access, **more)


def field(load, name: str) -> float:
    return float(load[FIELDS.index(name)])


def missing(load) -> np.ndarray:
    return np.array([value for name, value in zip(FIELDS, load, strict=True) if name.startswith("missing_")])


@pytest.mark.parametrize("access", [Uniform(), Zipf(0.8), Zipf(1.05), Zipf(1.3)])
def test_misses_are_those_of_the_cache_model(access):
    given = table(access=access)
    expected = [
        256 * given.count_lookups(BATCH) * (1 - given.compute_hit_rate(size / 256, BATCH))
        if size / 256 < given.rows
        else None
        for size in CACHE_BYTES
    ]
    for found, wanted in zip(missing(compute_part_load(Part(given, 64), BATCH)), expected, strict=True):
        if wanted is not None:
            assert found == pytest.approx(wanted, rel=0.01)


def test_loads_add_up():
    parts = [Part(table("a"), 64), Part(table("b", rows=300, dim=20, pooling=3), 20), Part(table("c", dim=128), 32)]
    assert total_load(parts, BATCH) == pytest.approx(sum(compute_part_load(part, BATCH) for part in parts))
    assert field(total_load(parts, BATCH), "columns") == 64 + 20 + 32
    assert find_longest_bag(parts) == 50


def test_rows_dealt_to_ranks_are_parts_of_the_whole():
    whole, part = compute_part_load(Part(table(), 64), BATCH), compute_part_load(Part(table(), 64, 0.25), BATCH)
    for name in ("lookups", "distinct_rows", "row_bytes", "touched_bytes", "long_rows", "long_lookups"):
        assert 4 * field(part, name) == pytest.approx(field(whole, name))
    # a quarter of the rows in a quarter of the cache misses a quarter as often
    assert 4 * missing(part)[3] == pytest.approx(missing(whole)[5], rel=0.01)


def test_an_empty_block_of_rows_asks_for_nothing_but_its_bags():
    load = compute_part_load(Part(table(), 64, 0.0), BATCH)
    assert (field(load, "tables"), field(load, "columns")) == (1, 64)
    assert field(load, "lookups") == field(load, "row_bytes") == missing(load).max() == 0


def test_long_runs_are_counted():
    lookups = 20 * 1000.0
    load = compute_table_load(Uniform(), 10, lookups, 16, 4)  # every row is accessed 2000 times
    assert field(load, "long_rows") == pytest.approx(10)
    assert field(load, "long_lookups") == pytest.approx(lookups)
    assert LONG_RUN == 32 and field(compute_table_load(Uniform(), 10**7, lookups, 16, 4), "long_rows") < 1e-3


def test_half_precision_rows_are_half_the_bytes_and_gradients_are_not():
    single, half = compute_part_load(Part(table(), 64), BATCH), compute_part_load(Part(table(dtype="fp16"), 64), BATCH)
    assert 2 * field(half, "touched_bytes") == field(single, "touched_bytes")
    assert field(half, "touched_fp32_bytes") == field(single, "touched_fp32_bytes")


def test_hottest_row_of_drawn_indices():
    given = table(rows=5000, pooling=10)
    weights = np.arange(1, 5001) ** -1.05
    draws = np.random.default_rng(1).choice(5000, size=BATCH * 10, p=weights / weights.sum())
    assert count_hottest_row_lookups(given, BATCH) == pytest.approx(np.bincount(draws).max(), rel=0.05)


def test_a_larger_cache_fetches_fewer_rows():
    part = Part(table(), 64)
    fetched = [count_fetched_rows(part, BATCH, share) for share in (0.01, 0.1, 0.5, 1.0)]
    assert fetched == sorted(fetched, reverse=True)
    assert fetched[0] <= table().count_unique_rows(BATCH) and fetched[-1] == 0
