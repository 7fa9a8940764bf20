"""Steps whose activations are computed again, against fresh captures with `torch.utils.checkpoint`."""

from __future__ import annotations

import pytest

from tests.transforms.steps import edited_step, kernels_of
from traincast.ir.validate import validate_workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
from tests.transforms.models import captured, ops_of  # noqa: E402


def _with_kernels(step):
    """The ops of a step but for those that checkpoint's hooks add, which launch nothing."""
    return [(scope, signature) for scope, signature in ops_of(step) if signature.name != "aten::detach"]


@pytest.mark.parametrize(
    ("name", "edits", "written"),
    [
        ("language", ["checkpoint=layers"], {}),
        ("language", ["checkpoint=Language.blocks.*", "dtype=bf16"], {"autocast": torch.bfloat16}),
        ("residual", ["checkpoint=*.block"], {}),
    ],
)
def test_activations_are_computed_again_as_checkpoint_does(name, edits, written):
    # given a step with the edit, and one of a model whose blocks run through torch.utils.checkpoint
    plain = captured(name)
    edited, fresh = edited_step(plain, *edits), captured(name, again=True, **written)

    # then the ops, the kernels, the time and the memory are the same
    validate_workload(edited)
    assert _with_kernels(edited) == _with_kernels(fresh)
    (mine, kernels), (theirs, wanted) = kernels_of(edited), kernels_of(fresh)
    assert kernels == wanted
    assert mine.iteration == pytest.approx(theirs.iteration, rel=0.01)
    assert mine.memory.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=0.02)
    assert mine.memory.peak_bytes <= kernels_of(plain)[0].memory.peak_bytes


def test_a_built_in_model_trades_time_for_memory():
    # given BERT, whose layers are found by themselves
    plain = load_single_gpu_step(Scenario(workload="bert-large", attention="sdpa", optimizer="sgd"))
    before, after = (kernels_of(step)[0] for step in (plain, edited_step(plain, "checkpoint=layers")))

    # then backward runs the forward pass of its layers once more
    assert 1.15 < after.device_active / before.device_active < 1.4
    assert after.memory.peak_bytes < 0.6 * before.memory.peak_bytes


@pytest.mark.parametrize(
    ("variant", "edit", "reason"),
    [
        (Scenario(), "checkpoint=layers", "no repeated layers"),
        (Scenario(), "checkpoint=*.encoder", "no module fits"),
        (Scenario(mode="inference"), "checkpoint=layers", "only training"),
    ],
)
def test_what_cannot_be_computed_again_says_why(variant, edit, reason):
    with pytest.raises(TraincastError, match=reason):
        edited_step(load_single_gpu_step(variant.replace(workload="din")), edit)
