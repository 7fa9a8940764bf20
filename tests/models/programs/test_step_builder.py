"""What a tape writes: tensors, scopes, ops, views, casts and collectives."""

from __future__ import annotations

import pytest

from traincast.ir import Phase, StorageKind
from traincast.models.layers.builder import Communicator, StepBuilder, contiguous


@pytest.fixture
def tape():
    tape = StepBuilder(8)
    tape.scope("aten::start", Phase.FORWARD)
    return tape


def names(tape):
    return [op.name for op in tape.build().ops]


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((3, 0), (1, 1)), ((0, 4), (4, 1))]
)
def test_row_major_strides(shape, strides):
    assert contiguous(shape) == strides


def test_a_resident_tensor_is_there_before_the_step(tape):
    ref = tape.resident((4, 16), StorageKind.PARAMETER)
    tape.op("aten::relu_", [("self", ref)], [ref])

    program = tape.build()

    assert ref.shape == (4, 16)
    assert int(program.storage_nbytes[ref.storage]) == 4 * 16 * 4
    assert int(program.columns.storage_alloc[ref.storage]) == -1
    assert int(program.columns.storage_kind[ref.storage]) == StorageKind.PARAMETER


def test_a_new_tensor_is_allocated_by_the_next_op_and_freed_after_the_last(tape):
    first = tape.new((4,), "float16")
    tape.op("aten::ones", [], [first])
    second = tape.new((4,), "float16")
    tape.op("aten::relu", [("self", first)], [second])
    tape.free(first)

    c = tape.build().columns

    assert (c.storage_alloc[first.storage], c.storage_free[first.storage]) == (0, 1)
    assert c.storage_alloc[second.storage] == 1
    assert c.storage_free[second.storage] == 2, "never freed: outlives the step's two ops"


def test_host_memory_takes_no_device_bytes(tape):
    host = tape.resident((1 << 20,), StorageKind.INPUT, "int64", "cpu:pinned")
    assert int(tape.build().storage_nbytes[host.storage]) == 0


def test_a_view_shares_storage_and_type(tape):
    whole = tape.resident((4, 6), StorageKind.BUFFER, "bfloat16")

    turned = tape.view(whole, (6, 4), (1, 6))

    assert turned.storage == whole.storage
    assert turned.tensor != whole.tensor
    assert (turned.spec.dtype, turned.spec.stride) == ("bfloat16", (1, 6))


def test_backward_runs_on_its_own_thread_tied_to_the_scope_before():
    tape = StepBuilder(1)
    for name, phase in (
        ("aten::mm", Phase.FORWARD),
        ("aten::ones_like", Phase.BACKWARD),
        ("MmBackward0", Phase.BACKWARD),
        ("TBackward0", None),
        ("Optimizer.step#SGD.step", Phase.OPTIMIZER),
    ):
        tape.scope(name, phase)

    scopes = tape.build().scopes

    # the first gradient is still made by the thread that called backward
    assert [scope.thread for scope in scopes] == [0, 0, 1, 1, 0]
    assert [scope.after for scope in scopes] == [-1, -1, 1, -1, 3]
    assert scopes[3].phase == Phase.BACKWARD, "without a phase a scope stays in the one before"


def test_ops_of_the_engine_have_scopes_of_their_own_only_where_the_profiler_shows_them(tape):
    tape.engine_op_scope("aten::sum")
    assert tape.build().num_scopes == 1

    tape.engine_ops_apart = True
    tape.engine_op_scope("aten::sum")
    assert [scope.name for scope in tape.build().scopes] == ["aten::start", "aten::sum"]


def test_groups_count_the_tensors_of_each_argument(tape):
    one, two = (tape.resident((2,), StorageKind.BUFFER) for _ in range(2))
    out = tape.new((4,))

    tape.op("aten::cat", [("tensors", (one, two))], [out], [("dim", 0)], overload="x", module="m", stream=3)

    (op,) = tape.build().ops
    assert op.signature.groups == (("tensors", 2),)
    assert (op.signature.overload, op.module, op.stream) == ("x", "m", 3)
    assert [tensor.id for tensor in op.inputs] == [one.tensor, two.tensor]


def test_slices_are_views_side_by_side(tape):
    whole = tape.resident((8, 10), StorageKind.BUFFER)

    parts = tape.slices(whole, (3, 0, 7), module="m")

    assert [part.shape for part in parts] == [(8, 3), (8, 0), (8, 7)]
    assert {part.storage for part in parts} == {whole.storage}
    assert {part.spec.stride for part in parts} == {(10, 1)}
    bounds = [(op.signature.scalar("start"), op.signature.scalar("end")) for op in tape.build().ops]
    assert bounds == [(0, 3), (3, 3), (3, 10)]


def test_a_slice_keeps_the_other_dimensions(tape):
    whole = tape.resident((8, 5, 4), StorageKind.BUFFER)
    part, op = tape.slice(whole, 0, 2, 6, module="")
    assert (part.shape, op) == ((4, 5, 4), 0)


def test_a_copy_to_another_device_keeps_its_type(tape):
    source = tape.resident((7,), StorageKind.BUFFER, "int32")

    copy = tape.moved(source, "cpu", module="m")

    assert (copy.spec.device, copy.spec.dtype) == ("cpu", "int32")
    assert tape.build().ops[0].signature.scalar("non_blocking") is False


def test_an_input_is_copied_in_a_scope_of_its_own(tape):
    copied = tape.copied_in((8, 13), "float32")

    program = tape.build()

    assert copied.spec.device == "cuda"
    assert (program.scopes[-1].name, program.scopes[-1].phase) == ("aten::to", Phase.INPUT)
    assert program.ops[-1].inputs[0].spec.device == "cpu:pinned"


@pytest.mark.parametrize(
    ("shape", "stride", "kept"),
    [((4, 6), (6, 1), (6, 1)), ((6, 4), (1, 6), (1, 6)), ((4, 3), (6, 1), (3, 1))],
    ids=["contiguous", "transposed", "with gaps"],
)
def test_a_cast_keeps_the_layout_of_dense_tensors_only(tape, shape, stride, kept):
    whole = tape.resident((4, 6), StorageKind.BUFFER)
    half, _ = tape.cast(tape.view(whole, shape, stride), "float16")
    assert (half.spec.dtype, half.spec.stride) == ("float16", kept)


def test_autocast_casts_floats_once_asked_for(tape):
    single = tape.resident((4,), StorageKind.PARAMETER)
    assert tape.autocast(single, "m") == (single, -1)

    tape.half = "bfloat16"
    cast, op = tape.autocast(single, "m")
    assert (cast.spec.dtype, op) == ("bfloat16", 0)
    assert tape.autocast(cast, "m") == (cast, -1), "what is half already stays"


def test_the_way_back_of_a_cast_frees_what_came(tape):
    grad = tape.new((4,), "bfloat16")
    tape.op("aten::ones", [], [grad])
    assert tape.cast_backward(grad, -1) is grad

    back = tape.cast_backward(grad, 0, module="m")

    program = tape.build()
    assert back.spec.dtype == "float32"
    assert program.scopes[-1].name == "ToCopyBackward0"
    assert program.columns.storage_free[grad.storage] == program.num_ops - 1


def test_a_collective_waits_for_the_stream_and_records_its_end(tape):
    flat = tape.resident((16,), StorageKind.GRADIENT)
    first, second = Communicator(0, (0, 1)), Communicator(5, (1, 3))

    events = [tape.all_reduce(group, flat) for group in (first, second, first)]
    tape.wait(events[-1])

    ops = tape.build().ops
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


def test_a_collective_in_backward_has_no_module_around_it(tape):
    flat = tape.resident((4,), StorageKind.BUFFER)
    group = Communicator(0, (0, 1))
    tape.op("aten::view", [("self", flat)], [flat], module="m")

    tape.collective("x_", "all_gather", group, [("t", flat)], flat, nbytes=16, module="m", forward=0)

    around, collective = tape.build().ops[1], tape.build().ops[3]
    assert (around.module, collective.module, collective.forward) == ("", "m", 0)


def test_the_batch_size_is_the_program_s():
    tape = StepBuilder(48)
    tape.scope("aten::start", Phase.FORWARD)
    assert tape.build().batch_size == 48
    assert names(tape) == []
