"""A DLRM on many GPUs without a plan."""

from __future__ import annotations

import pytest

from traincast.errors import TraincastError
from traincast.models.dlrm_config import DLRM_DEFAULT, DLRM_MLPERF
from traincast.parallel.hybrid import described_dlrm, dlrm_tables, hybrid_dlrm, hybrid_variant
from traincast.platform import load_platform
from traincast.workload import Phase


def exchanged(workload, kind):
    return [
        [op for op in workload.programs[program].ops if op.signature.scalar("collective") == kind]
        for program in workload.ranks
    ]


def test_tables_are_those_of_the_model():
    tables = dlrm_tables(DLRM_MLPERF)
    assert [table.rows for table in tables] == list(DLRM_MLPERF.rows_per_table)
    assert {(table.dim, table.pooling.mean, table.optimizer) for table in tables} == {(128, 1.0, "sgd")}


def test_equal_tables_are_dealt_out_evenly():
    # Given eight equal tables, when they go to four GPUs, then all do the same: two tables each
    workload, said = hybrid_dlrm(DLRM_DEFAULT, 4, load_platform("dgx-a100"), batch_size=64)
    assert workload.ranks == (0, 0, 0, 0)
    assert "split" not in said
    # pooled rows of two tables of width 64 for the samples of every rank
    sent = {op.signature.scalar("bytes") for ops in exchanged(workload, "all_to_all") for op in ops}
    assert 4 * 64 * 2 * 64 * 4 in sent


def test_mlps_are_averaged_over_all_gpus():
    workload, _ = hybrid_dlrm(DLRM_DEFAULT, 4, load_platform("dgx-a100"), batch_size=64)
    widths = [
        *zip((512, 512, 64), (512, 64), strict=False),
        *zip((100, 1024, 1024, 1024), (1024, 1024, 1024, 1), strict=False),
    ]
    parameters = sum(a * b + b for a, b in widths)
    for ops in exchanged(workload, "all_reduce"):
        assert sum(op.signature.scalar("bytes") for op in ops) == 4 * parameters


def test_a_table_that_fits_nowhere_is_split_by_rows():
    workload, said = hybrid_dlrm(DLRM_MLPERF, 16, load_platform("dgx1-v100"), batch_size=64)
    assert "split by rows" in said
    assert all(exchanged(workload, "reduce_scatter"))


def test_without_its_optimizer():
    workload, _ = hybrid_variant(DLRM_DEFAULT, 2, load_platform("dgx-a100"), optimizer="none")
    assert not [op for op in workload.programs[0].ops if op.phase == Phase.OPTIMIZER]


def test_other_models_are_none():
    assert described_dlrm("gpt2-large") is None
    assert described_dlrm("dlrm-ddp") is not None


def test_unknown_optimizers_are_refused():
    with pytest.raises(TraincastError, match="adamm"):
        hybrid_variant(DLRM_DEFAULT, 2, load_platform("dgx-a100"), optimizer="adamm")
