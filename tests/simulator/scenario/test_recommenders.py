"""A DLRM by name on many GPUs, in a variant."""

from __future__ import annotations

import pytest

from traincast.hardware import load_platform
from traincast.ir import Phase
from traincast.models.dlrm.config import DLRM_DEFAULT
from traincast.simulator.scenario.dlrm_file import load_described_dlrm
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import build_hybrid_variant
from traincast.utils.errors import TraincastError


def test_without_its_optimizer():
    workload, _ = build_hybrid_variant(DLRM_DEFAULT, 2, load_platform("dgx-a100"), Scenario(optimizer="none"))
    assert not [op for op in workload.programs[0].ops if op.phase == Phase.OPTIMIZER]


def test_a_built_in_name_is_a_description():
    assert load_described_dlrm("dlrm-ddp").name == "dlrm-ddp"


@pytest.mark.parametrize("gpus", [0, 4097, 65536])
def test_numbers_of_gpus_that_cannot_be_walked_are_refused(gpus):
    with pytest.raises(TraincastError, match=f"over {gpus} GPUs .* from 1 to 4096"):
        build_hybrid_variant(DLRM_DEFAULT, gpus, load_platform("dgx-a100"), Scenario())


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Scenario(embedding="bag"), "FBGEMM's, not 'bag'"),
        (Scenario(dtype="fp8"), "give fp32, tf32, bf16 or fp16"),
    ],
)
def test_what_such_a_step_does_not_have_is_refused(variant, message):
    with pytest.raises(TraincastError, match=message):
        build_hybrid_variant(DLRM_DEFAULT, 2, load_platform("dgx-a100"), variant)


def test_half_precision_is_autocast_of_the_dense_part():
    workload, _ = build_hybrid_variant(
        DLRM_DEFAULT, 2, load_platform("dgx-a100"), Scenario(dtype="fp16", batch_size=64)
    )

    (products,) = {op.inputs[0].spec.dtype for op in workload.programs[0].ops if op.name == "aten::addmm"}
    assert products == "float16"
