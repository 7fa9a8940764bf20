"""Buckets of gradients, and what DDP's reducer does with them."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.ir import Phase, StorageKind, TensorSpec
from traincast.models.data_parallel.data_parallel import BUCKET_BYTES, Reducer, assign_buckets
from traincast.models.layers.builder import RankBuilder


def form(numel, dtype="float32"):
    return TensorSpec((numel,), (1,), dtype)


def test_a_bucket_is_closed_once_it_reaches_its_limit():
    buckets = assign_buckets([form(256)] * 5, [1024, 2048])
    assert [bucket.members for bucket in buckets] == [(0,), (1, 2), (3, 4)]
    assert [bucket.offsets for bucket in buckets] == [(0,), (0, 256), (0, 256)]
    assert [bucket.numel for bucket in buckets] == [256, 512, 512]


def test_every_type_has_buckets_and_limits_of_its_own():
    forms = [form(256), form(512, "bfloat16"), form(256), form(64, "bfloat16")]
    buckets = assign_buckets(forms, [1024, 4096])
    # each first bucket has the first limit; what is not full is closed at the end
    assert [(bucket.members, bucket.dtype) for bucket in buckets] == [
        ((0,), "float32"),
        ((1,), "bfloat16"),
        ((2,), "float32"),
        ((3,), "bfloat16"),
    ]


def test_sorted_buckets_are_in_the_order_of_their_first_members():
    forms = [form(64, "int64"), form(1024), form(64, "int64")]
    members = [bucket.members for bucket in assign_buckets(forms, [4096])]
    assert members == [(1,), (0, 2)]
    assert [bucket.members for bucket in assign_buckets(forms, [4096], sort=True)] == [(0, 2), (1,)]


def test_nothing_makes_no_bucket():
    assert assign_buckets([], BUCKET_BYTES) == ()


def test_a_bucket_is_one_flat_buffer():
    (bucket,) = assign_buckets([form(3, "float16"), form(5, "float16")], [1 << 20])
    assert bucket.flat == TensorSpec((8,), (1,), "float16")


@pytest.mark.parametrize("seed", range(5))
def test_it_is_pytorch_s_assignment(seed):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4000, 60).tolist()
    dtypes = rng.choice(["float32", "bfloat16"], 60).tolist()
    tensors = [torch.empty(size, dtype=getattr(torch, dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]
    limits = [2000, 9000]

    wanted, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(
        tensors, limits, [False] * 60, list(range(60))
    )

    ours = assign_buckets([form(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)], limits)
    assert sorted(bucket.members for bucket in ours) == sorted(tuple(bucket) for bucket in wanted)


def written(forms, *, as_views=False, limits=(1024, 2048)):
    """A backward pass that makes gradients of these forms, reduced over four ranks."""
    builder = RankBuilder(8, 0, 4, 4)
    reducer = Reducer(builder, builder.world, forms, limits_bytes=limits, as_views=as_views)
    builder.open_scope("Optimizer.zero_grad#SGD.zero_grad", Phase.OTHER)
    builder.add_op("aten::zero_", [("self", builder.add_resident_tensor((1,), StorageKind.BUFFER))])
    reducer.drop_gradients()
    grads = []
    for spec in forms:
        builder.open_scope("AddmmBackward0", Phase.BACKWARD)
        grad = builder.add_tensor(spec.shape, spec.dtype)
        builder.add_op("aten::mm", [], [grad])
        grads.append((grad, reducer.accumulate_gradient(grad)))
    reducer.finish_reduction()
    return builder.build_program(), grads


def ops(program, name):
    return [op for op in program.ops if op.name == name]


def test_a_full_bucket_is_reduced_while_backward_goes_on():
    program, _ = written([form(256)] * 5)

    reduces = ops(program, "c10d::allreduce_")
    last_product = ops(program, "aten::mm")[-1].index

    assert [op.signature.scalar("bytes") for op in reduces] == [1024, 2048, 2048]
    assert [op.index < last_product for op in reduces] == [True, True, False]
    assert {op.stream for op in reduces} == {1}


def test_a_gradient_is_divided_by_the_ranks_while_it_is_copied():
    program, _ = written([form(256)])
    (copy,) = ops(program, "aten::mul")
    assert copy.signature.scalar("other") == 0.25
    assert copy.signature.overload == "out"


def test_buckets_are_reduced_in_order_even_if_a_later_one_is_full_first():
    # Given a bucket of bfloat16 that is full before the first of float32, which was opened before it
    forms = [form(128), form(512, "bfloat16"), form(128)]
    program, _ = written(forms)

    reduces = ops(program, "c10d::allreduce_")

    numbers = [op.inputs[0].spec.dtype for op in reduces]
    assert numbers == [bucket.dtype for bucket in assign_buckets(forms, (1024, 2048))]


def test_gradients_are_copied_back_at_the_end_on_autograd_s_thread():
    program, _ = written([form(256)] * 3)

    back = ops(program, "aten::copy_")

    assert len(back) == 3
    assert {op.thread for op in back} == {1}
    assert {program.scopes[op.scope].name for op in back} == {"torch.distributed.ddp.reducer::copy_bucket_to_grad"}
    waits = [op for op in ops(program, "cuda::stream_wait_event") if op.stream == 0]
    assert len(waits) == 2, "one per bucket"
    offsets = [op.signature.scalar("storage_offset") for op in ops(program, "aten::as_strided")]
    assert offsets == [0, 0, 256]


def test_gradients_that_are_views_of_their_buckets_are_not_copied_back():
    program, grads = written([form(256)] * 3, as_views=True)

    assert ops(program, "aten::copy_") == []
    assert len(ops(program, "aten::as_strided")) == 3
    for came, read in grads:
        assert read.storage != came.storage
        divided = next(op for op in ops(program, "aten::mul") if op.outputs[0].storage == read.storage)
        assert program.columns.storage_free[came.storage] >= divided.index


def test_without_views_the_optimizer_reads_the_gradient_that_came():
    program, grads = written([form(256)])
    ((came, read),) = grads
    assert read.storage == came.storage
    assert program.columns.storage_kind[came.storage] == StorageKind.GRADIENT


@pytest.mark.parametrize(("as_views", "before"), [(False, 3), (True, 0)])
def test_the_gradients_of_the_step_before_are_dropped(as_views, before):
    program, _ = written([form(256)] * 3, as_views=as_views)
    c = program.columns
    dropped = (c.storage_kind == StorageKind.GRADIENT) & (c.storage_alloc < 0) & (c.storage_free == 0)
    assert int(dropped.sum()) == before


def test_buckets_are_memory_of_the_kind_asked_for():
    builder = RankBuilder(8, 0, 2, 2)
    builder.open_scope("aten::start", Phase.FORWARD)
    Reducer(builder, builder.world, [form(1000)], kind=StorageKind.GRADIENT)
    program = builder.build_program()
    assert program.storage_nbytes.tolist() == [4000]
    assert program.columns.storage_kind.tolist() == [StorageKind.GRADIENT]
