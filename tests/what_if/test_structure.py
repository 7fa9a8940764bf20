"""Edits of ops against fresh captures of the edited model: the same kernels, the same time."""

from __future__ import annotations

import pytest

import traincast
from tests.what_if.steps import edited_step, kernels_of
from traincast.what_if.ask import both
from traincast.what_if.edits.registry import parse_edits
from traincast.what_if.options import scene_from
from traincast.what_if.predict import step_of
from traincast.workload.validate import validate_workload

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

_FUSED = torch.library.Library("inductor", "FRAGMENT")
_FUSED.define("fused(Tensor x) -> (Tensor, Tensor)")
_FUSED.impl("fused", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
_FUSED.define("fused_backward(Tensor grad, Tensor y) -> Tensor")
_FUSED.impl("fused_backward", lambda grad, y: torch.empty_like(y), "Meta")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept, result = torch.ops.inductor.fused(x)
        ctx.save_for_backward(kept)
        return result

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.inductor.fused_backward(grad, *ctx.saved_tensors)


def _mlp(*, passes=1, optimizer=torch.optim.SGD, by_hand=False):
    """A step of a small network, written with what an edit would change."""

    def make_step(batch_size):
        model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 128)).cuda()
        steps = optimizer(model.parameters(), lr=0.01)
        batches = passes * [torch.empty(batch_size, 256, device="cuda")]

        def step():
            steps.zero_grad()
            for batch in batches:
                hidden = model[0](batch)
                hidden = _Fused.apply(hidden) if by_hand else torch.sigmoid(hidden).mul(2.0)
                model[1](hidden).square().mean().backward()
            steps.step()

        return step

    return traincast.capture(make_step, batch_size=64, name="mlp")


@pytest.fixture(scope="module")
def capture():
    return _mlp()


@pytest.mark.parametrize(
    ("edit", "written"),
    [
        ("accumulate=3", {"passes": 3}),
        ("optimizer=adam", {"optimizer": torch.optim.AdamW}),
        ("optimizer=adagrad", {"optimizer": torch.optim.Adagrad}),
    ],
)
def test_an_edit_of_ops_is_a_fresh_capture_of_the_edited_model(capture, edit, written):
    # given a captured step with the edit, and a capture of the model that was written so
    (edited, mine), (fresh, theirs) = (kernels_of(step) for step in (edited_step(capture, edit), _mlp(**written)))

    # then both launch the same kernels and take the same time
    assert mine == theirs
    assert edited.iteration == pytest.approx(fresh.iteration, rel=0.01)
    assert edited.device_active == pytest.approx(fresh.device_active, rel=0.01)
    assert edited.memory.peak_bytes == pytest.approx(fresh.memory.peak_bytes, rel=0.02)


def test_an_edited_capture_can_still_change_its_size(capture):
    scene = scene_from(capture, "a100-80gb", {})
    _, changed = both(scene, parse_edits(["accumulate=3", "batch-size=128"]))
    step = step_of(changed)[0]
    assert step.batch_size == 128 and step.samples == 384


def test_accumulated_batches_count_as_samples(capture):
    answer = traincast.whatif(capture, on="a100-80gb", edits=["accumulate=4"])
    assert answer.cost_after.samples == 4 * answer.cost_before.samples
    assert answer.change.ratio > 1


def test_fused_chains_are_those_of_a_model_fused_by_hand(capture):
    (edited, mine), (fresh, theirs) = (
        kernels_of(s) for s in (edited_step(capture, "fuse-elementwise"), _mlp(by_hand=True))
    )
    before = kernels_of(capture)[1]
    assert mine.total() < before.total()
    assert mine.total() <= theirs.total()
    products = [{call: n for call, n in kernels.items() if call.family.name == "gemm"} for kernels in (mine, theirs)]
    assert products[0] == products[1]
    assert edited.device_active <= fresh.device_active * 1.01


def test_an_op_on_another_stream_waits_for_what_it_reads(capture):
    # given a step whose products run on a stream of their own
    step = edited_step(capture, "stream:aten::addmm=1")
    answer, kernels = kernels_of(step)

    # then it launches the same kernels, in the same order of data, and is no faster: every product waits for the last
    plain, before = kernels_of(capture)
    assert kernels == before
    assert answer.iteration >= plain.iteration * 0.999
    assert set(step.programs[0].columns.op_stream.tolist()) >= {0, 1}


def test_every_edit_of_ops_leaves_a_sound_workload(capture):
    for edit in ("accumulate=2", "fuse-elementwise", "compile", "stream:aten::mm=2", "optimizer=adagrad"):
        validate_workload(edited_step(capture, edit))
