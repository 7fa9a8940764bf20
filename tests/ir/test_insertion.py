"""Putting scopes and ops into a program."""

from __future__ import annotations

import numpy as np
import pytest

from traincast.ir import Phase, ProgramBuilder, Signature, StorageKind, TensorSpec
from traincast.ir.editor import ProgramEditor
from traincast.ir.generalise import generalise_captures
from traincast.ir.validate import validate_program

NEW = Signature("aten::relu_", (TensorSpec((7,), (1,), "float32"),), (TensorSpec((7,), (1,), "float32"),))


def two_products(batch):
    """x -> y in scope a, y -> z in scope b on thread 1, nothing in scope c; y is freed after the last op, w before
    the first."""
    builder = ProgramBuilder(batch_size=batch)
    spec = TensorSpec((batch, 4), (4, 1), "float32")
    product = Signature("aten::relu", (spec,), (spec,), groups=(("self", 1),))
    x = builder.add_storage(16 * batch, StorageKind.INPUT, before_step=True)
    old = builder.add_storage(64, StorageKind.GRADIENT, before_step=True)
    builder.set_lifetime(old, -1, 0)
    builder.open_scope("a", Phase.FORWARD)
    y = builder.add_storage(16 * batch)
    tensors = [builder.add_tensor(s) for s in (x, y)]
    builder.add_op(product, tensors[:1], tensors[1:])
    builder.open_scope("b", Phase.BACKWARD, thread=1, after=0)
    z = builder.add_storage(16 * batch)
    tensors.append(builder.add_tensor(z))
    builder.add_op(product, tensors[1:2], tensors[2:], forward=0)
    builder.free_storage(y)
    builder.open_scope("c", Phase.OTHER, after=1)
    return builder.build_program()


def inserted(program):
    editor = ProgramEditor(program)
    new = editor.insertion
    new.insert_before(0)
    new.open_scope("first", Phase.FORWARD)
    storage = new.add_storage(28)
    tensor = new.add_tensor(storage)
    new.add_op(NEW, [tensor], [tensor], module="new", stream=3)
    new.append_to(1)
    new.add_op(NEW, [tensor], [tensor])
    new.insert_before(2)
    new.open_scope("last", Phase.BACKWARD, thread=1)
    new.add_op(NEW, [tensor], [tensor])
    new.free_storage(storage)
    new.set_wait(2)
    return editor.build()


def test_new_scopes_and_ops_are_where_they_were_put():
    program = inserted(two_products(3))
    validate_program(program)
    assert [(s.name, s.first_op, s.num_ops) for s in program.scopes] == [
        ("first", 0, 1), ("a", 1, 1), ("b", 2, 2), ("last", 4, 1), ("c", 5, 0),
    ]  # fmt: skip
    assert [op.name for op in program.ops] == ["aten::relu_", "aten::relu", "aten::relu", "aten::relu_", "aten::relu_"]
    assert [s.after for s in program.scopes] == [-1, -1, 1, -1, 3]
    assert (program.ops[0].module, program.ops[0].stream) == ("new", 3)


def test_what_was_there_keeps_its_tensors_and_links():
    old, new = two_products(3), inserted(two_products(3))
    for before, after in zip(old.ops, (new.ops[1], new.ops[2]), strict=True):
        assert (before.signature, before.inputs, before.outputs) == (after.signature, after.inputs, after.outputs)
    assert new.ops[2].forward == 1


def test_lifetimes_move_with_their_ops():
    c = inserted(two_products(3)).columns
    x, old, y, z, new = zip(c.storage_alloc.tolist(), c.storage_free.tolist(), strict=True)
    assert x == (-1, 5)  # outlives the step
    assert old == (-1, 0)  # was gone before the first op and still is
    assert (y, z, new) == ((1, 2), (2, 5), (0, 4))


def test_old_sizes_follow_the_batch_and_new_ones_stay():
    general = generalise_captures([two_products(batch) for batch in (2, 5, 7)])
    grown = inserted(general).resized(11, 0)
    assert grown.ops[1].inputs[0].spec.shape == (11, 4)
    assert grown.ops[0].inputs[0].spec.shape == (7,)
    assert grown.storage_nbytes.tolist() == [176, 64, 176, 176, 28]


def test_equal_signatures_are_kept_once():
    program = inserted(two_products(3))
    assert len(program.symbolic) == 2
    assert len(set(np.unique(program.columns.op_signature))) == 2


@pytest.mark.parametrize("batch", [1, 4])
def test_nothing_new_changes_nothing(batch):
    old = two_products(batch)
    editor = ProgramEditor(old)
    assert editor.insertion.last_scope == -1
    same = editor.build()
    assert same.ops == old.ops
    assert same.scopes == old.scopes
    assert same.columns.storage_free.tolist() == old.columns.storage_free.tolist()
