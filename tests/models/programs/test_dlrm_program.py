"""The DLRM written without torch is the DLRM that is captured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.effort import calls
from tests.evaluation.zoo.captured import capture_dlrm, connected, storages
from traincast.ir import compute_peak_memory
from traincast.models.dlrm.config import DLRM_DDP, DLRM_DEFAULT, DLRM_MLPERF, DlrmConfig
from traincast.models.dlrm.program import build_dlrm_workload, write_dlrm
from traincast.utils.errors import TraincastError

UNEVEN = DlrmConfig(
    name="uneven",
    bottom_mlp=(7, 24, 16),
    top_mlp=(40, 1),
    rows_per_table=(5, 900, 33),
    embedding_dim=16,
    lookups_per_table=(4, 1, 9),
    loss="mse",
    index_dtype="int64",
)
CONFIGS = [
    DLRM_DEFAULT,
    DLRM_MLPERF,
    DLRM_DDP,
    UNEVEN,
    *(
        replace(UNEVEN, embedding=embedding, optimizer=optimizer, interaction=interaction, index_dtype=index)
        for embedding, optimizer, interaction, index in (
            ("batched", "adagrad", "cat", "int32"),
            ("batched", "adam", "dot", "int64"),
            ("fbgemm", "sgd", "dot", "int32"),
            ("fbgemm", "adagrad", "cat", "int64"),
            ("fbgemm", "adam", "cat", "int32"),
        )
    ),
]


def _name(config: DlrmConfig) -> str:
    return f"{config.name}-{config.embedding}-{config.optimizer}-{config.interaction}-{config.index_dtype}"


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_equals_a_fresh_capture(config: DlrmConfig, mode: str) -> None:
    captured = capture_dlrm(config, 48, mode=mode)

    written = write_dlrm(config, 48, mode=mode)

    assert [s.name for s in written.scopes] == [s.name for s in captured.scopes]
    assert written.scopes == captured.scopes
    for ours, theirs in zip(connected(written), connected(captured), strict=True):
        assert ours == theirs
    assert storages(written) == storages(captured)
    assert compute_peak_memory(written) == compute_peak_memory(captured)


@pytest.mark.parametrize("batch", [1, 2, 1000])
def test_re_batched_equals_a_program_written_at_that_size(batch: int) -> None:
    workload = build_dlrm_workload(DLRM_MLPERF).resized(batch_size=batch)

    direct = write_dlrm(DLRM_MLPERF, batch)

    (program,) = workload.programs
    assert list(connected(program)) == list(connected(direct))
    assert storages(program) == storages(direct)


def test_keeps_the_true_table_heights_though_fewer_rows_are_resident() -> None:
    program = write_dlrm(DLRM_MLPERF, 8)

    (lookup,) = [op for op in program.ops if op.name == "traincast::batched_embedding_forward"]

    assert lookup.signature.scalar("rows") == DLRM_MLPERF.rows_per_table
    assert lookup.signature.inputs[0].shape == (sum(min(rows, 2_000_000) for rows in DLRM_MLPERF.rows_per_table), 128)


def test_bag_is_refused_with_a_remedy() -> None:
    with pytest.raises(TraincastError, match="'bag' needs torch"):
        build_dlrm_workload(replace(DLRM_DDP, embedding="bag"))


def test_is_quick() -> None:
    assert calls(lambda: build_dlrm_workload(DLRM_MLPERF)) < 50_000, "some hundredths of a second"


def test_needs_no_torch() -> None:
    code = (
        "import sys; from traincast.simulator.scenario.dlrm_file import parse_dlrm; "
        "from traincast.models.dlrm.program import build_dlrm_workload; from traincast.models.catalog import "
        "load_model; "
        "from traincast.models.dlrm.config import DLRM_DDP; build_dlrm_workload(DLRM_DDP); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
