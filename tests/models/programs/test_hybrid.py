"""A DLRM on many GPUs without a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.ir import compute_peak_memory
from traincast.models.dlrm.config import DLRM_DEFAULT, DLRM_MLPERF, DLRM_V2
from traincast.models.placement.memory import MemoryLimits, compute_common_bytes, compute_shard_bytes
from traincast.models.placement.options import WEIGHTS, make_greedy_plan
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.step import BALANCED, build_hybrid_dlrm, make_dlrm_tables


def exchanged(workload, kind):
    return [
        [op for op in workload.programs[program].ops if op.signature.scalar("collective") == kind]
        for program in workload.ranks
    ]


def test_tables_are_those_of_the_model():
    tables = make_dlrm_tables(DLRM_MLPERF)
    assert [table.rows for table in tables] == list(DLRM_MLPERF.rows_per_table)
    assert {(table.dim, table.pooling.mean, table.optimizer) for table in tables} == {(128, 1.0, "sgd")}


def test_equal_tables_are_dealt_out_evenly():
    # Given eight equal tables, when they go to four GPUs, then all do the same: two tables each
    workload, said = build_hybrid_dlrm(DLRM_DEFAULT, 4, batch_size=64, memory_bytes=80e9, gpus_per_node=8)
    assert workload.ranks == (0, 0, 0, 0)
    assert "split" not in said
    # pooled rows of two tables of width 64 for the samples of every rank
    sent = {op.signature.scalar("bytes") for ops in exchanged(workload, "all_to_all") for op in ops}
    assert 4 * 64 * 2 * 64 * 4 in sent


def test_mlps_are_averaged_over_all_gpus():
    workload, _ = build_hybrid_dlrm(DLRM_DEFAULT, 4, batch_size=64, memory_bytes=80e9, gpus_per_node=8)
    widths = [
        *zip((512, 512, 64), (512, 64), strict=False),
        *zip((100, 1024, 1024, 1024), (1024, 1024, 1024, 1), strict=False),
    ]
    parameters = sum(a * b + b for a, b in widths)
    for ops in exchanged(workload, "all_reduce"):
        assert sum(op.signature.scalar("bytes") for op in ops) == 4 * parameters


def test_a_table_that_fits_nowhere_is_split_by_rows():
    workload, said = build_hybrid_dlrm(DLRM_MLPERF, 16, batch_size=64, memory_bytes=16e9, gpus_per_node=8)
    assert "split by rows" in said
    assert all(exchanged(workload, "reduce_scatter"))


@pytest.mark.parametrize(("config", "batch"), [(DLRM_V2, 8192), (DLRM_MLPERF, 2048), (DLRM_DEFAULT, 2048)])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_the_memory_that_plans_are_made_with_is_enough_for_the_step(config, batch, optimizer):
    # Given what the planner counts for each rank: its tables, its part of the collectives, the dense part
    config = replace(config, optimizer=optimizer)
    tables, memory_bytes = make_dlrm_tables(config), 80e9
    dense = Dense.from_dlrm(config).compute_memory_bytes(sum(table.dim for table in tables), batch)
    limits = MemoryLimits(device=memory_bytes, dense=dense)
    plan = make_greedy_plan(tables, WEIGHTS[BALANCED], limits, 8, batch_size=batch)
    need = np.full(8, compute_common_bytes(tables, batch_size=batch) + dense)
    for shard in plan.make_shards(tables):
        placed = plan.placements[shard.table]
        need[shard.rank] += compute_shard_bytes(tables[shard.table], placed, shard, batch_size=batch, world_size=8)[0]

    workload, _ = build_hybrid_dlrm(config, 8, batch_size=batch, memory_bytes=memory_bytes, gpus_per_node=8)

    # then the peaks of the step by lifetimes are below it, but not far where tables are most of it
    peaks = [compute_peak_memory(workload.programs[program]).peak_bytes for program in workload.ranks]
    assert all(peak <= 1.01 * counted for peak, counted in zip(peaks, need, strict=True))
    assert max(peaks) > 0.5 * max(need)
