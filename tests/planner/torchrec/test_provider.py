"""TorchRec's dry-run planning with our platforms and costs; its newest releases have it."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC
from traincast.planner.torchrec.provider import make_planner_provider, make_requested_task, run_dry_run
from traincast.utils.errors import TraincastError

pytestmark = NEEDS_TORCHREC
HAS_PROVIDER = find_spec("torchrec") is not None and find_spec("torchrec.distributed.planner.provider") is not None


@pytest.fixture
def request_of_two():
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=64, num_embeddings=1000, feature_names=[name]) for name in "ab"
    ]
    return SimpleNamespace(
        model=EmbeddingBagCollection(tables=tables, device=torch.device("meta")), world_size=4, batch_size=256,
        constraints={"a": SimpleNamespace(pooling_factors=[7.0])}, hbm_gb=None, ddr_gb=None,
    )  # fmt: skip


def test_a_request_is_a_task_on_the_platform_it_names(request_of_two):
    task = make_requested_task("dgx-h100", request_of_two)

    assert [(table.name, table.pooling.mean) for table in task.tables] == [("a", 7.0), ("b", 1.0)]
    assert (task.platform.key, task.gpus, task.batch_size) == ("dgx-h100", 4, 256)


def test_memory_that_is_stated_holds(request_of_two):
    request_of_two.hbm_gb = 8.0

    assert make_requested_task("dgx-h100", request_of_two).limits.device == 8.0 * 2**30


def test_hardware_without_a_description_is_named(request_of_two):
    with pytest.raises(TraincastError, match="dgx-x100"):
        make_requested_task("dgx-x100", request_of_two)


@pytest.mark.skipif(HAS_PROVIDER, reason="this TorchRec has it")
def test_an_older_torchrec_is_told_what_serves_it():
    with pytest.raises(TraincastError, match="came with"):
        make_planner_provider()


@pytest.mark.skipif(not HAS_PROVIDER, reason="TorchRec 1.9 has it")
def test_torchrec_s_command_line_plans_over_a_list_of_hardware(capsys):
    asked = ["--sku-list", "dgx-a100,dgx-h100", "--world-size", "2", "--batch-size", "64", "--num-tables", "2",
             "--storage-reservation-policy", "fixed_percentage"]  # fmt: skip

    assert run_dry_run(asked) == 0
    assert capsys.readouterr().out.count("[OK]") == 2
