"""Edits of how GPUs exchange gradients, against fresh captures under DistributedDataParallel."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest

import traincast
from tests.transforms.steps import edited_step
from traincast.hardware.platform import load_platform
from traincast.ir.validate import validate_workload
from traincast.simulator.prediction.prediction import predict_step
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from traincast.capturing import capture_distributed, capture_step  # noqa: E402

GPUS = 4
BATCH = 16384  # kernels that last: exchanges can run alongside them
NODE = "dgx-a100"


def _waits(group, bucket):
    """A hook that lets kernels wait for each all-reduce."""
    dist.all_reduce(bucket.buffer(), group=group)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _step(wrap=lambda model: model, passes=1):
    """A step with buffers, whose gradients fill several buckets of half a MiB."""

    def make_step(batch, **_):
        net = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 600), nn.Linear(600, 8))
        model = wrap(net.cuda())
        steps = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = passes * [torch.empty(batch, 256, device="cuda")]

        def step():
            steps.zero_grad()
            for number, samples in enumerate(batches):
                with nullcontext() if number == passes - 1 else model.no_sync():
                    model(samples).square().mean().backward()
            steps.step()

        return step

    return make_step


def _captured(hook=None, passes=1, **options):
    def wrap(model):
        wrapped = DistributedDataParallel(model, **options)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    return capture_distributed(
        _step(wrap, passes), world_size=GPUS, batch_size=BATCH, name="net", ranks=[0], rebatch=False
    )  # fmt: skip


@pytest.fixture(scope="module")
def one():
    return capture_step(_step(), batch_size=BATCH, name="net", rebatch=False)


def _edited(source, *edits, **options):
    return edited_step(source, *edits, on=NODE, **options)


def _same(edited, fresh):
    """Both run the same ops and collectives, in the same time."""
    validate_workload(edited)
    (mine, ours), (theirs, wanted) = (
        (predict_step(step, load_platform(NODE)), Counter(op.name for op in step.programs[0].ops))
        for step in (edited, fresh)
    )
    assert ours == wanted
    assert mine.iteration == pytest.approx(theirs.iteration, rel=0.01)
    assert mine.exposed_comm == pytest.approx(theirs.exposed_comm, rel=0.01)
    assert mine.memory.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=0.01)


@pytest.mark.parametrize("size", [0.5, 100.0])
def test_buckets_are_those_of_a_capture_with_that_size(one, size):
    edited = _edited(one, f"bucket-mb={size}", gpus=GPUS)
    _same(edited, _captured(bucket_cap_mb=size))
    reduced = sum(op.name == "c10d::allreduce_" for op in edited.programs[0].ops)
    assert reduced == (2 if size < 1 else 1)


def test_without_overlap_the_step_is_one_whose_kernels_wait_for_every_exchange(one):
    # given the edit, and a capture whose hook waits for each all-reduce
    edited = _edited(one, "bucket-mb=0.5", "overlap=none", gpus=GPUS)
    fresh = _captured(hook=_waits, bucket_cap_mb=0.5)

    # then both take as long, and longer than with overlap
    times = [predict_step(step, load_platform(NODE)).iteration for step in (edited, fresh)]
    assert times[0] == pytest.approx(times[1], rel=0.01)
    assert times[0] > predict_step(_edited(one, "bucket-mb=0.5", gpus=GPUS), load_platform(NODE)).iteration


def test_accumulated_passes_exchange_gradients_in_the_last_only(one):
    # given a capture of three passes of which two are inside `no_sync`
    fresh = _captured(passes=3, bucket_cap_mb=0.5)

    # then a step of one GPU that becomes data parallel, and one captured under DDP, are the same with the edit
    _same(_edited(one, "bucket-mb=0.5", "accumulate=3", gpus=GPUS), fresh)
    _same(_edited(_captured(bucket_cap_mb=0.5), "accumulate=3"), fresh)


def test_gradients_that_are_views_of_their_buckets_are_accumulated_too():
    edited = _edited(_captured(gradient_as_bucket_view=True), "accumulate=2")
    _same(edited, _captured(passes=2, gradient_as_bucket_view=True))


def test_a_hook_of_its_own_is_refused():
    compressed = _captured(hook=default_hooks.fp16_compress_hook)
    with pytest.raises(TraincastError, match="hook of its own"):
        _edited(compressed, "accumulate=2")


def test_sharded_tables_are_exchanged_in_every_pass_and_gradients_in_one():
    result = traincast.whatif("dlrm-ddp", on="dgx2-v100", gpus=4, edits=["accumulate=3"])
    counts = [
        Counter(op.signature.scalar("collective") for op in step.workload.programs[0].ops)
        for step in (result.before, result.after)
    ]
    assert counts[1]["all_to_all"] == 3 * counts[0]["all_to_all"] > 0
    assert counts[1]["all_reduce"] == counts[0]["all_reduce"] > 0
    assert any("updated in every pass" in said for said in result.after.warnings)
    # the host is the limit here: to add gradients up takes it longer than the optimizer that passes leave out
    assert 2 < result.change.ratio < 3.3
