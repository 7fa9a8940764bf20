"""Writing into a program that is there already."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.ir import Phase, StorageKind
from traincast.ir.validate import validate_program
from traincast.models.data_parallel.data_parallel import InsertingBuilder, broadcast_buffers, find_buffers
from traincast.models.layers.builder import Communicator, StepBuilder
from traincast.utils.errors import TraincastError

GROUP = Communicator(0, (0, 1, 2))


def program_with(*buffers, communicator=None):
    """Forward of a module with parameters that reads these buffers (shape, dtype), and a backward pass."""
    builder = StepBuilder(4)
    weight = builder.add_resident_tensor((4, 4), StorageKind.PARAMETER)
    held = [builder.add_resident_tensor(shape, StorageKind.BUFFER, dtype) for shape, dtype in buffers]
    builder.open_scope("aten::to", Phase.INPUT)
    builder.add_op("aten::_to_copy", [], [builder.add_tensor((4, 4))], module="")
    builder.open_scope("aten::mm", Phase.FORWARD)
    builder.add_op("aten::mm", [("self", weight), ("others", held)], [builder.add_tensor((4, 4))], module="Model.layer")
    if communicator is not None:
        flat = builder.add_resident_tensor((4,), StorageKind.GRADIENT)
        builder.add_all_reduce(Communicator(7, (0, 1)), flat)
        builder.add_all_reduce(communicator, flat)
    builder.open_scope("MmBackward0", Phase.BACKWARD)
    builder.add_op("aten::mm", [], [builder.add_tensor((4, 4))], module="Model.layer")
    return builder.build_program()


def test_ops_go_to_the_end_of_a_scope():
    builder = InsertingBuilder(program_with(), GROUP)
    builder.append_to(1)
    builder.add_op("aten::relu", [], [builder.add_tensor((4,))])

    program = builder.build_program()

    assert [op.name for op in program.ops] == ["aten::_to_copy", "aten::mm", "aten::relu", "aten::mm"]
    assert [scope.num_ops for scope in program.scopes] == [1, 2, 1]
    validate_program(program)


def test_new_scopes_come_before_an_old_one_on_its_thread():
    builder = InsertingBuilder(program_with(), GROUP)
    builder.insert_before(3)
    builder.open_engine_scope("aten::as_strided", Phase.BACKWARD)
    builder.add_op("aten::as_strided", [], [])
    builder.insert_before(0)
    builder.open_engine_scope("first", Phase.FORWARD)

    scopes = builder.build_program().scopes

    assert [scope.name for scope in scopes] == ["first", "aten::to", "aten::mm", "MmBackward0", "aten::as_strided"]
    assert [scope.thread for scope in scopes] == [0, 0, 0, 1, 1]


def test_what_is_new_lives_between_new_ops():
    builder = InsertingBuilder(program_with(), GROUP)
    builder.append_to(0)
    made = builder.add_tensor((8,))
    builder.add_op("aten::ones", [], [made])
    builder.add_op("aten::relu_", [("self", made)], [made])
    builder.free_tensors(made)

    program = builder.build_program()
    c = program.columns

    assert (c.storage_alloc[made.storage], c.storage_free[made.storage]) == (1, 2)
    assert program.storage_nbytes[made.storage] == 32


def test_a_communicator_keeps_its_stream_and_events_go_on():
    builder = InsertingBuilder(program_with(communicator=GROUP), GROUP)
    builder.append_to(1)
    event = builder.add_all_reduce(GROUP, builder.add_resident_tensor((4,), StorageKind.GRADIENT))

    reduces = [op for op in builder.build_program().ops if op.signature.scalar("communicator") == 0]

    assert [op.stream for op in reduces] == [2, 2], "the second communicator that the program uses"
    assert event == 5, "two all-reduces before it recorded events 0 to 3"


def test_a_new_communicator_gets_the_next_free_stream():
    builder = InsertingBuilder(program_with(communicator=Communicator(1, (0, 1))), GROUP)
    builder.append_to(1)
    builder.add_all_reduce(GROUP, builder.add_resident_tensor((4,), StorageKind.GRADIENT))
    (reduced,) = [op for op in builder.build_program().ops if op.signature.scalar("communicator") == 0]
    assert reduced.stream == 3


def test_buffers_are_those_that_an_op_takes_as_a_whole():
    program = program_with(((6,), "float32"), ((2, 3), "int64"))
    assert [(ref.shape, ref.spec.dtype) for ref in find_buffers(program)] == [((6,), "float32"), ((2, 3), "int64")]
    assert find_buffers(program_with()) == []


def broadcast(*buffers):
    program = program_with(*buffers)
    builder = InsertingBuilder(program, GROUP)
    broadcast_buffers(builder, GROUP, find_buffers(program))
    return builder.build_program()


def test_buffers_of_a_type_travel_together_and_come_back():
    program = broadcast(((6,), "float32"), ((2, 3), "float32"))

    sent = [op for op in program.ops if op.signature.scalar("collective") == "broadcast"]
    back = [op for op in program.ops if op.name == "aten::copy_"]

    assert [(op.signature.scalar("bytes"), op.signature.scalar("root")) for op in sent] == [(48, 0)]
    assert [op.outputs[0].spec.shape for op in back] == [(6,), (2, 3)]
    assert program.scopes[1].name == "torch.distributed::_broadcast_coalesced", "before the module, after its inputs"
    assert {program.scopes[op.scope].name for op in (*sent, *back)} == {"torch.distributed::_broadcast_coalesced"}
    validate_program(program)


def test_a_lone_buffer_is_sent_as_it_lies():
    program = broadcast(((6,), "float32"))
    names = [op.name for op in program.ops]
    assert "aten::cat" not in names
    assert names.count("c10d::broadcast_") == 1


def test_two_pieces_are_in_flight():
    program = broadcast(((6,), "float32"), ((6,), "int64"), ((6,), "bool"))
    order = [op.name for op in program.ops if op.name in ("c10d::broadcast_", "aten::copy_")]
    assert order == ["c10d::broadcast_", "c10d::broadcast_", "aten::copy_", "c10d::broadcast_", "aten::copy_",
                     "aten::copy_"]  # fmt: skip


def test_without_buffers_nothing_is_sent():
    program = program_with()
    builder = InsertingBuilder(program, GROUP)
    broadcast_buffers(builder, GROUP, [])
    assert builder.build_program().num_ops == program.num_ops


def test_a_buffer_that_is_not_contiguous_is_refused():
    builder = StepBuilder(4)
    weight = builder.add_resident_tensor((4, 4), StorageKind.PARAMETER)
    turned = builder.add_view(builder.add_resident_tensor((2, 3), StorageKind.BUFFER), (3, 2), (1, 3))
    builder.open_scope("aten::mm", Phase.FORWARD)
    builder.add_op("aten::mm", [("self", weight), ("other", turned)], [builder.add_tensor((4, 4))], module="Model")
    program = builder.build_program()

    with pytest.raises(TraincastError, match="not contiguous"):
        broadcast_buffers(InsertingBuilder(program, GROUP), GROUP, find_buffers(program))


def test_the_old_program_is_left_as_it_was():
    program = program_with(((6,), "float32"))
    before = {name: getattr(program.columns, name).copy() for name in program.columns.names()}
    builder = InsertingBuilder(program, GROUP)
    broadcast_buffers(builder, GROUP, find_buffers(program))
    builder.build_program()
    assert all(np.array_equal(getattr(program.columns, name), values) for name, values in before.items())
