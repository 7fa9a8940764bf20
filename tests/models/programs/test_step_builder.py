"""What a builder writes: tensors, scopes, ops, views, casts and collectives."""

from __future__ import annotations

import pytest

from traincast.ir import Phase, StorageKind
from traincast.models.layers.builder import Communicator, StepBuilder, compute_contiguous_strides


@pytest.fixture
def builder():
    builder = StepBuilder(8)
    builder.open_scope("aten::start", Phase.FORWARD)
    return builder


def names(builder):
    return [op.name for op in builder.build_program().ops]


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((3, 0), (1, 1)), ((0, 4), (4, 1))]
)
def test_row_major_strides(shape, strides):
    assert compute_contiguous_strides(shape) == strides


def test_a_resident_tensor_is_there_before_the_step(builder):
    ref = builder.add_resident_tensor((4, 16), StorageKind.PARAMETER)
    builder.add_op("aten::relu_", [("self", ref)], [ref])

    program = builder.build_program()

    assert ref.shape == (4, 16)
    assert int(program.storage_nbytes[ref.storage]) == 4 * 16 * 4
    assert int(program.columns.storage_alloc[ref.storage]) == -1
    assert int(program.columns.storage_kind[ref.storage]) == StorageKind.PARAMETER


def test_a_new_tensor_is_allocated_by_the_next_op_and_freed_after_the_last(builder):
    first = builder.add_tensor((4,), "float16")
    builder.add_op("aten::ones", [], [first])
    second = builder.add_tensor((4,), "float16")
    builder.add_op("aten::relu", [("self", first)], [second])
    builder.free_tensors(first)

    c = builder.build_program().columns

    assert (c.storage_alloc[first.storage], c.storage_free[first.storage]) == (0, 1)
    assert c.storage_alloc[second.storage] == 1
    assert c.storage_free[second.storage] == 2, "never freed: outlives the step's two ops"


def test_host_memory_takes_no_device_bytes(builder):
    host = builder.add_resident_tensor((1 << 20,), StorageKind.INPUT, "int64", "cpu:pinned")
    assert int(builder.build_program().storage_nbytes[host.storage]) == 0


def test_a_view_shares_storage_and_type(builder):
    whole = builder.add_resident_tensor((4, 6), StorageKind.BUFFER, "bfloat16")

    turned = builder.add_view(whole, (6, 4), (1, 6))

    assert turned.storage == whole.storage
    assert turned.tensor != whole.tensor
    assert (turned.spec.dtype, turned.spec.stride) == ("bfloat16", (1, 6))


def test_backward_runs_on_its_own_thread_tied_to_the_scope_before():
    builder = StepBuilder(1)
    for name, phase in (
        ("aten::mm", Phase.FORWARD),
        ("aten::ones_like", Phase.BACKWARD),
        ("MmBackward0", Phase.BACKWARD),
        ("TBackward0", None),
        ("Optimizer.step#SGD.step", Phase.OPTIMIZER),
    ):
        builder.open_scope(name, phase)

    scopes = builder.build_program().scopes

    # the first gradient is still made by the thread that called backward
    assert [scope.thread for scope in scopes] == [0, 0, 1, 1, 0]
    assert [scope.after for scope in scopes] == [-1, -1, 1, -1, 3]
    assert scopes[3].phase == Phase.BACKWARD, "without a phase a scope stays in the one before"


def test_ops_of_the_engine_have_scopes_of_their_own_only_where_the_profiler_shows_them(builder):
    builder.open_engine_op_scope("aten::sum")
    assert builder.build_program().num_scopes == 1

    builder.engine_ops_apart = True
    builder.open_engine_op_scope("aten::sum")
    assert [scope.name for scope in builder.build_program().scopes] == ["aten::start", "aten::sum"]


def test_groups_count_the_tensors_of_each_argument(builder):
    one, two = (builder.add_resident_tensor((2,), StorageKind.BUFFER) for _ in range(2))
    out = builder.add_tensor((4,))

    builder.add_op("aten::cat", [("tensors", (one, two))], [out], [("dim", 0)], overload="x", module="m", stream=3)

    (op,) = builder.build_program().ops
    assert op.signature.groups == (("tensors", 2),)
    assert (op.signature.overload, op.module, op.stream) == ("x", "m", 3)
    assert [tensor.id for tensor in op.inputs] == [one.tensor, two.tensor]


def test_slices_are_views_side_by_side(builder):
    whole = builder.add_resident_tensor((8, 10), StorageKind.BUFFER)

    parts = builder.add_column_slices(whole, (3, 0, 7), module="m")

    assert [part.shape for part in parts] == [(8, 3), (8, 0), (8, 7)]
    assert {part.storage for part in parts} == {whole.storage}
    assert {part.spec.stride for part in parts} == {(10, 1)}
    bounds = [(op.signature.scalar("start"), op.signature.scalar("end")) for op in builder.build_program().ops]
    assert bounds == [(0, 3), (3, 3), (3, 10)]


def test_a_slice_keeps_the_other_dimensions(builder):
    whole = builder.add_resident_tensor((8, 5, 4), StorageKind.BUFFER)
    part, op = builder.add_slice(whole, 0, 2, 6, module="")
    assert (part.shape, op) == ((4, 5, 4), 0)


def test_a_copy_to_another_device_keeps_its_type(builder):
    source = builder.add_resident_tensor((7,), StorageKind.BUFFER, "int32")

    copy = builder.add_device_copy(source, "cpu", module="m")

    assert (copy.spec.device, copy.spec.dtype) == ("cpu", "int32")
    assert builder.build_program().ops[0].signature.scalar("non_blocking") is False


def test_an_input_is_copied_in_a_scope_of_its_own(builder):
    copied = builder.add_input_copy((8, 13), "float32")

    program = builder.build_program()

    assert copied.spec.device == "cuda"
    assert (program.scopes[-1].name, program.scopes[-1].phase) == ("aten::to", Phase.INPUT)
    assert program.ops[-1].inputs[0].spec.device == "cpu:pinned"


@pytest.mark.parametrize(
    ("shape", "stride", "kept"),
    [((4, 6), (6, 1), (6, 1)), ((6, 4), (1, 6), (1, 6)), ((4, 3), (6, 1), (3, 1))],
    ids=["contiguous", "transposed", "with gaps"],
)
def test_a_cast_keeps_the_layout_of_dense_tensors_only(builder, shape, stride, kept):
    whole = builder.add_resident_tensor((4, 6), StorageKind.BUFFER)
    half, _ = builder.add_cast(builder.add_view(whole, shape, stride), "float16")
    assert (half.spec.dtype, half.spec.stride) == ("float16", kept)


def test_autocast_casts_floats_once_asked_for(builder):
    single = builder.add_resident_tensor((4,), StorageKind.PARAMETER)
    assert builder.add_autocast(single, "m") == (single, -1)

    builder.half = "bfloat16"
    cast, op = builder.add_autocast(single, "m")
    assert (cast.spec.dtype, op) == ("bfloat16", 0)
    assert builder.add_autocast(cast, "m") == (cast, -1), "what is half already stays"


def test_the_way_back_of_a_cast_frees_what_came(builder):
    grad = builder.add_tensor((4,), "bfloat16")
    builder.add_op("aten::ones", [], [grad])
    assert builder.add_cast_backward(grad, -1) is grad

    back = builder.add_cast_backward(grad, 0, module="m")

    program = builder.build_program()
    assert back.spec.dtype == "float32"
    assert program.scopes[-1].name == "ToCopyBackward0"
    assert program.columns.storage_free[grad.storage] == program.num_ops - 1


def test_a_collective_waits_for_the_stream_and_records_its_end(builder):
    flat = builder.add_resident_tensor((16,), StorageKind.GRADIENT)
    first, second = Communicator(0, (0, 1)), Communicator(5, (1, 3))

    events = [builder.add_all_reduce(group, flat) for group in (first, second, first)]
    builder.wait_for_event(events[-1])

    ops = builder.build_program().ops
    assert events == [1, 3, 5], "two events each: before and after"
    one = [(op.name, op.stream) for op in ops[:4]]
    assert one == [
        ("cuda::event_record", 0),
        ("cuda::stream_wait_event", 1),
        ("c10d::allreduce_", 1),
        ("cuda::event_record", 1),
    ]
    reduces = [op for op in ops if op.name == "c10d::allreduce_"]
    assert [op.stream for op in reduces] == [1, 2, 1], "a stream for each communicator"
    assert [op.signature.scalar("group") for op in reduces] == [(0, 1), (1, 3), (0, 1)]
    assert {op.signature.scalar("bytes") for op in reduces} == {64}
    assert (ops[-1].name, ops[-1].signature.scalar("event"), ops[-1].stream) == ("cuda::stream_wait_event", 5, 0)


def test_a_collective_in_backward_has_no_module_around_it(builder):
    flat = builder.add_resident_tensor((4,), StorageKind.BUFFER)
    group = Communicator(0, (0, 1))
    builder.add_op("aten::view", [("self", flat)], [flat], module="m")

    builder.add_collective("x_", "all_gather", group, [("t", flat)], flat, nbytes=16, module="m", forward=0)

    around, collective = builder.build_program().ops[1], builder.build_program().ops[3]
    assert (around.module, collective.module, collective.forward) == ("", "m", 0)


def test_the_batch_size_is_the_program_s():
    builder = StepBuilder(48)
    builder.open_scope("aten::start", Phase.FORWARD)
    assert builder.build_program().batch_size == 48
    assert names(builder) == []
