"""Steps whose types were edited, against fresh captures of the model under autocast or with weights in 16 bits."""

from __future__ import annotations

import pytest

from tests.transforms.steps import edited_step, kernels_of
from traincast.ir.validate import validate_workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
from tests.transforms.models import captured, ops_of  # noqa: E402


@pytest.mark.parametrize(
    ("name", "choice", "written"),
    [
        ("recommender", "bf16", {"autocast": torch.bfloat16}),
        ("recommender", "bf16-weights", {"weights": torch.bfloat16}),
        ("language", "amp", {"autocast": torch.float16}),
        ("fused", "bf16", {"autocast": torch.bfloat16}),
        ("residual", "bf16", {"autocast": torch.bfloat16}),
        ("residual", "fp16-weights", {"weights": torch.float16}),
    ],
)
def test_an_edit_of_types_is_a_fresh_capture_of_the_edited_model(name, choice, written):
    # given a step captured in float32 and edited, and one of the model that was written so
    edited, fresh = edited_step(captured(name), f"dtype={choice}"), captured(name, **written)

    # then they run the same ops on the same forms, and so the same kernels in the same time
    validate_workload(edited)
    assert ops_of(edited) == ops_of(fresh)
    (mine, kernels), (theirs, wanted) = kernels_of(edited), kernels_of(fresh)
    assert kernels == wanted
    assert mine.iteration == pytest.approx(theirs.iteration, rel=0.01)
    assert mine.memory.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=0.02)


@pytest.mark.parametrize("model", ["din", "ncf", "hstu", "vgg13", "wide-deep"])
def test_autocast_of_a_saved_model_is_its_capture_under_autocast(model):
    # given a built-in model in float32, edited at its own size
    step = edited_step(load_single_gpu_step(Scenario(workload=model)), "dtype=bf16")
    fresh = load_single_gpu_step(Scenario(workload=model, dtype="bf16"))

    # then at that size and at twice its batch it runs the ops of the one that was captured under autocast
    for size in (None, 2 * step.batch_size):
        mine, theirs = step.resized(batch_size=size), fresh.resized(batch_size=size)
        assert ops_of(mine) == ops_of(theirs)
        (edited, _), (captured, _) = kernels_of(mine), kernels_of(theirs)
        assert edited.iteration == pytest.approx(captured.iteration, rel=0.01)
        assert edited.memory.peak_bytes == pytest.approx(captured.memory.peak_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("model", "edit", "reason"),
    [
        (load_single_gpu_step(Scenario(workload="din")), "dtype=fp8", "give bf16 here"),
        (load_single_gpu_step(Scenario(workload="din", dtype="bf16")), "dtype=fp16", "16 bits already"),
        (load_single_gpu_step(Scenario(workload="dlrm-ddp")), "dtype=bf16", "binary_cross_entropy_with_logits"),
    ],
)
def test_types_that_cannot_be_edited_say_what_works(model, edit, reason):
    with pytest.raises(TraincastError, match=reason):
        edited_step(model, edit)
