"""Edits of ops against fresh captures of the edited model: the same kernels, the same time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import traincast
from tests.transforms.steps import assert_same, edited_step, kernels_of
from traincast.ir.validate import validate_workload
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.planner.what_if.result import prepare_both_sides
from traincast.simulator.scenario.predict import load_step
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

_FUSED = torch.library.Library("inductor", "FRAGMENT")
_FUSED.define("fused(Tensor x) -> (Tensor, Tensor)")
_FUSED.impl("fused", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
_FUSED.define("fused.gradient(Tensor grad, Tensor y) -> Tensor")
_FUSED.impl("fused.gradient", lambda grad, y: torch.empty_like(y), "Meta")


class _Fused(torch.autograd.Function):
    """A sigmoid and its double, as somebody would write them in one kernel, and their gradient in another."""

    @staticmethod
    def forward(ctx, x):
        kept, result = torch.ops.inductor.fused.default(x)
        ctx.save_for_backward(kept)
        return result

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.inductor.fused.gradient(grad, *ctx.saved_tensors)


def _mlp(*, passes=1, optimizer=torch.optim.SGD, by_hand=False, update=True):
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
                model[1](hidden).sum().backward()
            if update:
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
        ("optimizer=none", {"update": False}),
    ],
)
def test_an_edit_of_ops_is_a_fresh_capture_of_the_edited_model(capture, edit, written):
    # given a captured step with the edit, and a capture of the model that was written so: the same kernels and time
    assert_same(edited_step(capture, edit), _mlp(**written))


def test_an_edited_capture_can_still_change_its_size(capture):
    scene = resolve(Scenario(workload=capture, on="a100-80gb"))
    _, changed = prepare_both_sides(scene, parse_edits(["accumulate=3", "batch-size=128"]))
    step = load_step(changed)[0]
    assert step.batch_size == 128 and step.samples == 384


def test_accumulated_batches_count_as_samples(capture):
    result = traincast.whatif(capture, on="a100-80gb", edits=["accumulate=4"])
    assert result.cost_after.samples == 4 * result.cost_before.samples
    assert result.change.ratio > 1


def test_fused_chains_are_those_of_a_model_fused_by_hand(capture):
    # given a step with its chain of element-wise ops fused, and one whose author wrote the two kernels
    (edited, mine), (fresh, theirs) = (
        kernels_of(s) for s in (edited_step(capture, "fuse-elementwise"), _mlp(by_hand=True))
    )

    # then both launch the same kernels in the same time, and keep the same memory
    assert mine == theirs
    assert mine.total() < kernels_of(capture)[1].total()
    assert edited.device_active == pytest.approx(fresh.device_active, rel=0.01)
    assert edited.iteration == pytest.approx(fresh.iteration, rel=0.01)
    assert edited.memory.peak_bytes == pytest.approx(fresh.memory.peak_bytes, rel=0.02)


def test_an_op_on_another_stream_waits_for_what_it_reads(capture):
    # given a step whose GEMMs run on a stream of their own
    step = edited_step(capture, "stream:aten::addmm=1")
    result, kernels = kernels_of(step)

    # then it launches the same kernels, in the same order of data, and is no faster: every product waits for the last
    plain, before = kernels_of(capture)
    assert kernels == before
    assert result.iteration >= plain.iteration * 0.999
    assert set(step.programs[0].columns.op_stream.tolist()) >= {0, 1}


def _branches(*, apart):
    """A product that two kernels read, one of them on a stream of its own where they run `apart`."""

    def make_step(batch):
        weight = torch.empty(2048, 2048, device="cuda")
        samples = torch.empty(batch, 2048, device="cuda")
        side = torch.cuda.Stream() if apart else None

        def step():
            product = torch.mm(samples, weight)
            if apart:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side) if apart else nullcontext():
                one = torch.sigmoid(product)
            other = torch.relu(product)
            if apart:
                torch.cuda.current_stream().wait_stream(side)
            return one + other

        return step

    return traincast.capture(make_step, batch_size=2048, name="branches", mode="inference")


def test_an_op_on_another_stream_is_a_capture_that_ran_it_there():
    plain, apart = _branches(apart=False), _branches(apart=True)
    edited = edited_step(plain, "stream:aten::sigmoid=1")
    assert_same(edited, apart)
    assert kernels_of(edited)[0].iteration < 0.99 * kernels_of(plain)[0].iteration


def test_a_graphed_step_runs_its_kernels_without_waiting_for_the_host(capture):
    # given a step that waits for its host, and the same one replayed as a CUDA graph (which no capture can hold)
    plain, before = kernels_of(capture)
    graphed, kernels = kernels_of(edited_step(capture, "cuda-graph"))

    # then the kernels and their times are the same, and nothing but the gaps between them is left alongside
    assert plain.device_idle > plain.device_active
    assert kernels == before
    assert graphed.device_active == pytest.approx(plain.device_active, rel=1e-9)
    assert graphed.device_idle < 0.5 * plain.device_idle
    assert graphed.iteration == traincast.predict(capture, on="a100-80gb", cuda_graph=True).iteration


def test_every_edit_of_ops_leaves_a_sound_workload(capture):
    for edit in ("accumulate=2", "fuse-elementwise", "compile", "stream:aten::mm=2", "optimizer=adagrad"):
        validate_workload(edited_step(capture, edit))
