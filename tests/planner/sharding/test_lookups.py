from __future__ import annotations

import numpy as np
import pytest

from tests.planner.sharding.conftest import table
from traincast.hardware.platform import load_platform
from traincast.models.embeddings.access import Uniform
from traincast.models.embeddings.table import FIELDS, Part, compute_part_load
from traincast.models.placement import ComputeKernel, ShardingKind
from traincast.models.placement.options import Option
from traincast.planner.sharding.lookups import (
    BAG,
    BAG_POWER,
    COLUMNS,
    ELEMENTS,
    FETCHED,
    LOOKUPS,
    ROWS,
    TABLES,
    TERMS,
    LookupKernels,
    TableGroup,
    compute_shard_terms,
)

DEVICE = load_platform("dgx-a100").device
WHOLE = Option(ShardingKind.TABLE_WISE, 1)


def _terms(option, one=None):
    return compute_shard_terms(one or table("a", 8000, 64, 4), option, world_size=16, gpus_per_node=8, batch_size=100)


def test_a_whole_table_is_looked_up_for_all_ranks():
    terms = _terms(WHOLE)
    assert len(terms) == len(TERMS)
    assert terms[TABLES] == 1
    assert terms[LOOKUPS] == pytest.approx(100 * 16 * 4)
    assert (terms[COLUMNS], terms[ROWS], terms[ELEMENTS], terms[FETCHED]) == (64, 8000, 8000 * 64, 0)
    assert terms[BAG] ** (1 / BAG_POWER) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("option", "rows", "columns", "lookups"),
    [
        (Option(ShardingKind.ROW_WISE, 0), 500, 64, 400),
        (Option(ShardingKind.TABLE_ROW_WISE, 1), 1000, 64, 800),
        (Option(ShardingKind.COLUMN_WISE, 2), 8000, 32, 6400),
        (Option(ShardingKind.DATA_PARALLEL, 0, ComputeKernel.DENSE), 8000, 64, 400),
    ],
)
def test_a_part_of_a_table_has_its_share(option, rows, columns, lookups):
    terms = _terms(option)
    assert (terms[ROWS], terms[COLUMNS], terms[ELEMENTS]) == (rows, columns, rows * columns)
    assert terms[LOOKUPS] == pytest.approx(lookups)


def test_terms_begin_with_the_load_of_the_part():
    one = table("a", 8000, 64, 4)
    assert _terms(WHOLE, one)[: len(FIELDS)] == pytest.approx(compute_part_load(Part(one, 64, 1.0), 1600))


def test_only_a_cache_fetches():
    cached = Option(ShardingKind.TABLE_WISE, 1, ComputeKernel.FUSED_UVM_CACHING, 0.1)
    more = Option(ShardingKind.TABLE_WISE, 1, ComputeKernel.FUSED_UVM_CACHING, 0.5)
    assert _terms(Option(ShardingKind.TABLE_WISE, 1, ComputeKernel.FUSED_UVM))[FETCHED] == 0.0
    assert _terms(cached)[FETCHED] > _terms(more)[FETCHED] > 0.0


def test_groups_are_in_the_order_of_a_step():
    rows, copies = (
        TableGroup.of(table("a"), Option(kind, 0, kernel))
        for kind, kernel in (
            (ShardingKind.ROW_WISE, ComputeKernel.FUSED),
            (ShardingKind.DATA_PARALLEL, ComputeKernel.DENSE),
        )
    )
    whole = TableGroup.of(table("a"), WHOLE)
    narrow = TableGroup.of(table("a", dtype="fp16"), WHOLE)
    assert sorted([copies, rows, whole, narrow], key=lambda group: group.order) == [narrow, whole, rows, copies]
    assert copies.copied
    assert not rows.copied


def _kernels(*groups):
    return LookupKernels(groups, DEVICE, batch_size=100, world_size=16)


def test_no_table_takes_no_time():
    kernels = _kernels(TableGroup.of(table("a"), WHOLE))
    forward, backward = kernels.seconds(np.zeros((3, len(TERMS))), np.zeros(3, dtype=np.int64))
    assert forward.tolist() == backward.tolist() == [0.0, 0.0, 0.0]


def test_more_lookups_take_longer():
    kernels = _kernels(TableGroup.of(table("a"), WHOLE))
    sums = np.array([_terms(WHOLE, table("a", 8_000_000, 64, pooling)) for pooling in (4, 40, 400)])
    for seconds in kernels.seconds(sums, np.zeros(3, dtype=np.int64)):
        assert (np.diff(seconds) > 0).all()


def test_rows_from_the_host_take_their_copy():
    group = TableGroup.of(table("a"), Option(ShardingKind.TABLE_WISE, 1, ComputeKernel.FUSED_UVM_CACHING, 0.1))
    sums = np.array([_terms(WHOLE)] * 2)
    sums[1, FETCHED] = 1e9
    forward, _ = _kernels(group).seconds(sums, np.zeros(2, dtype=np.int64))
    host = 1e9 / 64e9  # no link to a host is faster
    assert forward[1] - forward[0] > host


def test_rows_of_half_the_bytes_are_read_faster():
    wide, narrow = (TableGroup.of(table("a", dtype=dtype), WHOLE) for dtype in ("fp32", "fp16"))
    scattered = [table("a", 80_000_000, 128, 4, access=Uniform(), dtype=dtype) for dtype in ("fp32", "fp16")]
    terms = [compute_shard_terms(one, WHOLE, world_size=16, gpus_per_node=8, batch_size=8192) for one in scattered]
    kernels = LookupKernels((wide, narrow), DEVICE, batch_size=8192, world_size=16)
    forward, _ = kernels.seconds(np.array(terms), np.array([0, 1]))
    assert forward[1] < 0.8 * forward[0]
