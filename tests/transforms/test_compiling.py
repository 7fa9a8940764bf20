"""The edit `compile` in training, against fresh captures of steps whose model goes through `torch.compile`."""

from __future__ import annotations

import pytest

from tests.transforms.steps import edited_step, kernels_of
from traincast.ir.validate import validate_workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step

torch = pytest.importorskip("torch")
from tests.transforms.models import captured, ops_of  # noqa: E402


@pytest.mark.parametrize(
    ("name", "edits", "written"),
    [
        ("language", ["compile"], {}),
        ("recommender", ["compile"], {}),
        ("residual", ["compile", "dtype=bf16"], {"autocast": torch.bfloat16}),
    ],
)
def test_a_compiled_step_is_a_fresh_capture_of_a_compiled_model(name, edits, written):
    # given a captured step with the edit, and a capture of a script that compiles the model
    plain = captured(name)
    edited, fresh = (
        edited_step(plain, *edits),
        load_single_gpu_step(Scenario(workload=captured(name, compiled=True, **written))),
    )

    # then it runs the same kernels, with the same work of the host
    validate_workload(edited)
    assert ops_of(edited) == ops_of(fresh)
    (mine, kernels), (theirs, wanted) = kernels_of(edited), kernels_of(fresh)
    assert kernels == wanted
    assert mine.iteration == pytest.approx(theirs.iteration, rel=0.01)
    assert mine.host == pytest.approx(theirs.host, rel=0.01)
    assert mine.memory.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=0.02)
    assert mine.device_active <= kernels_of(edited_step(plain, *edits[1:]) if edits[1:] else plain)[0].device_active


@pytest.mark.parametrize("model", ["din", "ncf", "resnet50", "dlrm-default"])
def test_a_compiled_built_in_model_trains_no_slower(model):
    eager, compiled = (
        kernels_of(load_single_gpu_step(Scenario(workload=model, compiled=one)))[0] for one in (False, True)
    )
    assert compiled.device_active <= eager.device_active
    assert compiled.host <= eager.host
    assert "compiled" in compiled.workload.meta
