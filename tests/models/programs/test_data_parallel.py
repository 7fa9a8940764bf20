"""Data parallelism without torch, against captures of the same models under `DistributedDataParallel`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.models.programs.steps import Convolutions, Norms, classifier, described, language_model
from traincast.capturing import capture_distributed, capture_step
from traincast.ir import compute_peak_memory
from traincast.ir.validate import validate_workload
from traincast.models.catalog import load_model
from traincast.models.data_parallel import apply_data_parallel
from traincast.utils.errors import TraincastError

CASES = {
    "norms, sgd": classifier(Norms, "sgd"),
    "norms, adam": classifier(Norms, "adam"),
    "norms, no optimizer": classifier(Norms, "none"),
    "norms, gradients zeroed in place": classifier(Norms, "sgd", set_to_none=False),
    "convolutions, adam": classifier(Convolutions, "adam"),
    "language model, adam": language_model("adam"),
    "language model, no optimizer": language_model("none"),
    "language model, mixed precision": language_model("sgd", mixed=True),
}


def one(make, *, rebatch=False):
    return capture_step(lambda batch: make(batch, lambda model: model), batch_size=8, name="x", rebatch=rebatch)


def wrapped(make, *, gpus=4, rebatch=False, **options):
    def make_step(batch, *, rank, world_size):
        return make(batch, lambda model: DistributedDataParallel(model, device_ids=[rank], **options))

    return capture_distributed(make_step, world_size=gpus, batch_size=8, name="x", ranks=[0], rebatch=rebatch)


@pytest.mark.parametrize("bucket_mb", [None, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_a_capture_of_ddp_records(name, bucket_mb):
    # Given a step captured on one GPU, and the same step captured under DDP
    expected = wrapped(CASES[name], bucket_cap_mb=bucket_mb)

    # When the first is made data parallel without torch
    made = apply_data_parallel(one(CASES[name]), 4, bucket_mb=bucket_mb)

    # Then both agree on every scope, op, stream, event, byte and lifetime
    validate_workload(made)
    assert made.ranks == expected.ranks == (0, 0, 0, 0)
    (lines, storages), (wanted, wanted_storages) = (described(w.programs[0]) for w in (made, expected))
    assert lines == wanted
    assert storages == wanted_storages


def test_small_buckets_are_many():
    made = apply_data_parallel(one(CASES["norms, sgd"]), 4, bucket_mb=0.5)
    reduced = [op.signature.scalar("bytes") for op in made.programs[0].ops if op.name == "c10d::allreduce_"]
    # Full at half a MiB: the last layer (64 x 1300) with the middle one, which overflows it; then the rest
    assert reduced == [4 * (64 * 1300 + 64 + 1300 + 1300 * 1300), 4 * (2 * 1300 + 64 * 1300 + 1300)]


def test_it_can_be_rebatched_before_and_after():
    plain, expected = one(CASES["norms, adam"], rebatch=True), wrapped(CASES["norms, adam"], rebatch=True)
    after = apply_data_parallel(plain, 4).resized(batch_size=48)
    before = apply_data_parallel(plain.resized(batch_size=48), 4)
    wanted = described(expected.resized(batch_size=48).programs[0])
    assert described(after.programs[0]) == described(before.programs[0]) == wanted


@pytest.mark.parametrize("name", ["resnet50", "gpt2-large", "xlnet", "vgg13"])
def test_built_in_models_reduce_every_gradient_once(name):
    workload = load_model(name)
    made = apply_data_parallel(workload, 1024)
    validate_workload(made)
    assert made.ranks == (0,) * 1024
    old, new = workload.programs[0], made.programs[0]
    reduced = sum(op.signature.scalar("bytes") for op in new.ops if op.name == "c10d::allreduce_")
    copied_in = sum(op.outputs[0].spec.nbytes for op in new.ops if op.signature.overload == "out")
    assert reduced == copied_in > 0
    # Buckets are memory that one GPU alone does not need
    grown = compute_peak_memory(new).peak_bytes - compute_peak_memory(old).peak_bytes
    assert 0.95 * reduced <= grown <= 1.1 * reduced


def test_one_gpu_needs_no_averaging():
    workload = load_model("vgg13")
    assert apply_data_parallel(workload, 1) is workload


def test_inference_is_copies_that_do_not_talk():
    workload = load_model("vgg13", mode="inference")
    made = apply_data_parallel(workload, 8)
    assert made.programs == workload.programs
    assert made.ranks == (0,) * 8


def test_tables_updated_inside_backward_are_refused():
    with pytest.raises(TraincastError, match=r"dlrm-default.*fused embedding tables"):
        apply_data_parallel(load_model("dlrm-default"), 2)


def test_sparse_gradients_are_refused():
    with pytest.raises(TraincastError, match="sparse"):
        apply_data_parallel(load_model("dlrm-default", embedding="bag"), 2)


def test_several_backward_passes_are_refused():
    def make_step(batch):
        model = nn.Linear(4, 4).cuda()
        x = torch.zeros(batch, 4, device="cuda")

        def step():
            model(x).sum().backward()
            model(x).sum().backward()

        return step

    with pytest.raises(TraincastError, match="several backward passes"):
        apply_data_parallel(capture_step(make_step, batch_size=2, name="x", rebatch=False), 2)


@pytest.mark.parametrize("gpus", [0, -3, 10**9])
def test_impossible_numbers_are_refused(gpus):
    with pytest.raises(TraincastError, match=f"{gpus} GPUs"):
        apply_data_parallel(load_model("vgg13"), gpus)


def test_a_workload_of_many_ranks_is_refused():
    with pytest.raises(TraincastError, match="runs on 4 GPUs already"):
        apply_data_parallel(apply_data_parallel(load_model("vgg13"), 4), 8)


def test_impossible_buckets_are_refused():
    with pytest.raises(TraincastError, match="above 0"):
        apply_data_parallel(load_model("vgg13"), 2, bucket_mb=0)
