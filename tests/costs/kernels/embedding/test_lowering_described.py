"""Described tables, what comes before a lookup, host memory and caches, and TensorFlow's sparse updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.costs.kernels.signatures import field, kernels, lowered, tensor
from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.cost import price_calls
from traincast.costs.kernels.embedding import EMBEDDING
from traincast.costs.kernels.families import load_shipped_model
from traincast.hardware import load_device
from traincast.models.embeddings import Pooling, Table, Zipf
from traincast.models.embeddings.table import FIELDS, Part, total_load
from traincast.utils.errors import TraincastError

TABLES = [
    Table(name="a", rows=1_000_000, dim=64, pooling=Pooling.from_constant(20), access=Zipf(1.1)),
    Table(name="b", rows=500, dim=16, pooling=Pooling.from_constant(3)),
]
LOAD = tuple(int(value) for value in total_load([Part(t, t.dim) for t in TABLES], 512).round())
FORMS = {"total_D": 80, "max_D": 64, "total_rows": 1_000_500, "load": LOAD, "longest_bag": 20}


def _inputs(dtype: str = "float32"):
    return {
        "dev_weights": tensor(64 * 1_000_000 + 8000, dtype=dtype),
        "indices": tensor(512 * 23, dtype="int64"),
        "offsets": tensor(1025, dtype="int64"),
    }


def _forward(dtype: str = "float32", **more):
    name = "fbgemm::split_embedding_codegen_forward_unweighted_cuda"
    (call,) = lowered(name, _inputs(dtype), tensor(512, 80), **FORMS, **more)
    return call


def _backward(optimizer: str, **more):
    name = f"fbgemm::split_embedding_backward_codegen_{optimizer}_unweighted_exact_cuda"
    outputs = [tensor(64 * 1_000_000 + 8000)] if optimizer == "dense" else []
    return lowered(name, {"grad_output": tensor(512, 80), **_inputs()}, outputs, **(FORMS | more))


def _seconds(call, device: str = "a100-80gb") -> float:
    return float(price_calls(Calls.of(call.family, [call]), load_device(device))[0].seconds[0])


def test_the_load_of_an_op_is_what_its_kernel_touches():
    call = _forward()
    assert (call.kind, field(call, "batch"), field(call, "tables")) == ("tbe_forward", 512, 2)
    assert (field(call, "lookups"), field(call, "columns"), field(call, "longest_bag")) == (512 * 23, 80, 20)
    assert field(_forward("float16"), "row_item_bytes") == 2


@pytest.mark.parametrize(
    ("part", "whole"), [("distinct_rows", "lookups"), ("long_rows", "distinct_rows"), ("long_lookups", "lookups")]
)
def test_a_load_that_contradicts_itself_is_refused(part, whole):
    """More different rows than lookups made the time of an update negative."""
    wrong = list(LOAD)
    wrong[FIELDS.index(part)] = 1_000_000_000
    with pytest.raises(TraincastError, match=rf"its load has 1e\+09 {part}, more than its \d+ {whole}"):
        _backward("sgd", load=tuple(wrong))


def test_a_load_with_a_number_missing_is_refused():
    with pytest.raises(TraincastError, match="its load has 25 numbers, not 26"):
        _backward("sgd", load=LOAD[:-1])


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_an_update_never_takes_negative_time(optimizer):
    call = _backward(optimizer)[-1]
    values = dict(zip(EMBEDDING.fields, call.values, strict=True)) | {"distinct_rows": 1e12}
    assert _seconds(replace(call, values=tuple(values.values()))) > 0


def test_a_dense_gradient_is_zeroed_first():
    assert kernels(_backward("dense"))[0] == "elementwise:fill"
    assert kernels(_backward("dense"))[-1] == "embedding:tbe_backward_dense"
    assert kernels(_backward("sgd"))[0] == "index:gather"


@pytest.mark.parametrize("device", ["v100", "a100-80gb", "h100"])
def test_more_state_takes_longer(device):
    seconds = [_seconds(_backward(name)[-1], device) for name in ("sgd", "rowwise_adagrad", "adagrad", "adam")]
    assert seconds == sorted(seconds)


def test_rows_in_host_memory_come_over_pcie():
    """Distinct rows at the wire's rate are the least it can take."""
    distinct = LOAD[8]
    assert _seconds(_forward(host=1)) > distinct / 24e9 > _seconds(_forward())
    state_only = _seconds(_backward("adagrad", host=2)[-1])
    assert _seconds(_backward("adagrad")[-1]) < state_only < _seconds(_backward("adagrad", host=1)[-1])


def test_one_long_bag_holds_its_kernel_up():
    call = _forward()
    at = EMBEDDING.fields.index("longest_bag")
    long = replace(call, values=(*call.values[:at], 1000.0, *call.values[at + 1 :]))
    assert _seconds(long) > 1000 * 0.35e-6 > _seconds(call)


def test_input_redistribution_has_kernels():
    lengths, values = tensor(4 * 64, dtype="int32"), tensor(5000, dtype="int64")
    outputs = [tensor(4 * 64, dtype="int32"), tensor(5000, dtype="int64")]
    inputs = {"lengths": lengths, "indices": values}
    permuted = kernels(lowered("fbgemm::permute_2D_sparse_data", inputs, outputs))
    assert permuted.count("index:gather") == 1 and permuted.count("reduction:inner") == 2
    assert permuted[-1] == "index:put", "a warp for each bag"
    dealt = kernels(lowered("fbgemm::block_bucketize_sparse_features", inputs, outputs))
    assert dealt.count("reduction:inner") == 3
    summed = kernels(lowered("fbgemm::asynchronous_complete_cumsum", {"t_in": lengths}, tensor(257, dtype="int64")))
    assert summed[-1] == "reduction:inner"


def test_many_short_bags_take_as_long_as_their_warps_wait():
    """A recommender's trace on A100 has 382 us for a million bags re-ordered, 605 us checked."""
    lengths, offsets = tensor(1_000_000, dtype="int32"), tensor(1_000_001, dtype="int64")
    for elements in (100_000, 2_000_000):
        values = tensor(elements, dtype="int64")
        inputs = {"lengths": lengths, "indices": values}
        *_, moved = lowered("fbgemm::permute_2D_sparse_data", inputs, [lengths, values])
        (check,) = lowered("fbgemm::bounds_check_indices", {"rows": lengths, "indices": values, "offsets": offsets})
        assert _seconds(moved) > 200e-6 and _seconds(check) > 200e-6


def test_a_cache_is_filled_over_pcie_with_what_it_lacks():
    inputs = {
        "weights": tensor(64_000_000, device="cpu:pinned"),
        "linear_cache_indices": tensor(10_000, dtype="int64"),
        "lxu_cache_weights": tensor(640_000),
    }
    sizes = {"fetched_rows": 900, "fetched_bytes": 230_400, "unique_rows": 4000}
    calls = lowered("fbgemm::lru_cache_populate", inputs, **sizes)
    assert kernels(calls)[-1] == "embedding:cache_fill"
    assert (field(calls[-1], "row_bytes"), field(calls[-1], "lookups")) == (230_400, 10_000)
    idle = lowered("fbgemm::lru_cache_populate", inputs, **{**sizes, "fetched_bytes": 0})
    search = 10_000 * load_shipped_model("embedding").parameters_.rates.fill_cycles / (108 * 1.41e9)
    assert search < _seconds(idle[-1]) < search + 5e-6
    moved = _seconds(calls[-1]) - _seconds(idle[-1])
    assert moved == pytest.approx(230_400 / (0.85 * 24e9), rel=0.02)


def test_tensorflow_makes_rows_unique_and_adds_them_with_atomics():
    ids, once, places = tensor(20_000, dtype="int64"), tensor(6000, dtype="int64"), tensor(20_000, dtype="int32")
    assert kernels(lowered("tensorflow::unique", {"x": ids}, [once, places])).count("index:sort") == 8 + 4
    inputs = {"data": tensor(20_000, 16), "segment_ids": places}
    forms = {"load": LOAD, "total_rows": 1_000_500}
    cool, hot = (
        lowered("tensorflow::unsorted_segment_sum", inputs, tensor(6000, 16), longest_bag=met, **forms)[-1]
        for met in (10, 1_000_000)
    )
    assert cool.kind == "row_sums"
    assert _seconds(hot) == pytest.approx(4 * 1e6 / 1.41e9, rel=0.1)
    assert _seconds(cool) < 1e-4
