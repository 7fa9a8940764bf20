from __future__ import annotations

import numpy as np
import pytest

from traincast.models.embeddings import Zipf, load_tables
from traincast.models.embeddings.access import make_row_classes
from traincast.models.embeddings.documents import BUILTIN_SETS, Recipe, synthesise_tables
from traincast.models.embeddings.reuse import NUM_BINS
from traincast_evaluation.suites.embedding_locality import read_locality

SYNTHESISED = [("dlrm-2021-856", "locality_2021.csv", 16), ("dlrm-2022-788", "locality_2022.csv", 16)]


def test_mlperf_sets_are_those_of_the_benchmark():
    first, second = load_tables("mlperf-dlrm"), load_tables("mlperf-dlrm-v2")
    assert (len(first), sum(table.rows for table in first)) == (26, 187_767_399)
    assert (len(second), sum(table.pooling.mean for table in second)) == (26, 214)
    assert {table.dim for table in (*first, *second)} == {128}
    assert {table.access for table in first} == {Zipf(1.05)}


@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_every_set_has_answers(name):
    tables = load_tables(name)
    assert len({table.name for table in tables}) == len(tables)
    assert all(
        0 < table.count_unique_rows(2048) <= min(table.rows, table.count_lookups(2048) * 1.001) for table in tables
    )


@pytest.mark.parametrize(("name", "file", "batches"), SYNTHESISED, ids=[name for name, *_ in SYNTHESISED])
def test_synthesised_sets_show_the_published_statistics(shared_data, name, file, batches):
    """Given the published batches, when all tables are looked up at their size, then totals and bins agree."""
    numbered = [
        locality
        for key, locality in read_locality(shared_data / "embedding_access" / file).items()
        if key.rsplit("_", 1)[-1].isdigit()
    ]
    assert len(numbered) == batches
    size = numbered[0].batch_size
    rows, lookups = np.zeros(NUM_BINS), np.zeros(NUM_BINS)
    for table in load_tables(name):
        own_rows, own_lookups = make_row_classes(table.access, table.rows).compute_reuse(table.count_lookups(size))
        rows, lookups = rows + own_rows, lookups + own_lookups
    assert lookups.sum() == pytest.approx(np.mean([b.lookups for b in numbered]), rel=0.01)
    assert rows.sum() == pytest.approx(np.mean([b.unique_rows for b in numbered]), rel=0.01)
    assert rows / rows.sum() == pytest.approx(np.mean([b.row_shares for b in numbered], axis=0), abs=0.01)
    assert lookups / lookups.sum() == pytest.approx(np.mean([b.access_shares for b in numbered], axis=0), abs=0.02)


def test_the_seed_decides_the_tables():
    shares = (0.5, 0.3, 0.2, *(0.0,) * 14)
    recipe = Recipe(
        tables=20, batch_size=64, lookups=16000, unique_rows=9000, row_shares=shares,
        access_shares=(0.28, 0.34, 0.38, *(0.0,) * 14), seed=1,
    )  # fmt: skip
    assert synthesise_tables(recipe) == synthesise_tables(recipe)
    assert len({table.pooling.mean for table in synthesise_tables(recipe)}) == 20
