"""What is measured on a GPU: drawn from a seed, in the types and at the sizes of training, each op as it can be run."""

from __future__ import annotations

from itertools import islice

from traincast.calibration.bench.bench import OpCall
from traincast.calibration.bench.device import plan_gpu_benchmarks
from traincast.calibration.bench.plans import plan_benchmarks
from traincast.calibration.bench.store import open_device
from traincast.costs.cpu.features import get_kind
from traincast.costs.cpu.samples import format_signature

NUMBER = 300


def drawn(seed):
    return list(islice(plan_gpu_benchmarks(seed), NUMBER))


def test_the_same_seed_draws_the_same_ops():
    first, again, other = ([format_signature(task.signature) for task in drawn(seed)] for seed in (0, 0, 1))
    assert first == again != other


def test_half_of_the_products_are_large_and_in_all_types():
    products = [task.signature for task in drawn(0) if get_kind(task.signature) == "gemm"]
    large = [one for one in products if 2.0 * one.outputs[0].numel * one.inputs[-1].shape[0] > 2.6e9]
    assert 0.3 < len(large) / len(products) < 0.7
    assert {one.outputs[0].dtype for one in products} == {"float32", "bfloat16", "float16"}
    assert {one.name for one in large} == {"aten::mm", "aten::addmm"}


def test_kinds_and_the_state_of_operands_stay_as_they_were_drawn():
    for task, plain in zip(drawn(0), plan_benchmarks(0), strict=False):
        assert (task.between, task.code_far, task.access) == (plain.between, plain.code_far, plain.access)
        assert get_kind(task.signature) == get_kind(plain.signature)
        assert sum(tensor.nbytes for tensor in task.signature.inputs) < 8 << 30


def test_ops_in_half_precision_run():
    device, ran = open_device("cpu"), set()
    for task in drawn(0):
        first = task.signature.inputs[0]
        if first.dtype != "float32" and first.numel < 1 << 16 and get_kind(task.signature) not in ran:
            OpCall(task.signature, device)()
            ran.add(get_kind(task.signature))
    assert len(ran) >= 3
