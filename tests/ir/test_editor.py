"""The editor of programs: whatever is dropped, merged or inserted, order, waits and memory stay sound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import traincast
from tests.ir.steps import make_mlp, same_program, spec
from traincast.ir import Phase, Program, ProgramBuilder, Signature, StorageKind
from traincast.ir.editor import ProgramEditor, TensorCopies
from traincast.ir.memory import compute_peak_memory
from traincast.ir.program import Columns
from traincast.ir.rows import ScopeRow, move_waits
from traincast.ir.validate import validate_program
from traincast.utils.errors import TraincastError

NOTHING = Signature("x::nothing", (), ())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Scopes of two threads that wait for earlier ones; ops that make, change and view memory, some of it freed."""
    builder = ProgramBuilder(batch_size=2)
    storages = [builder.add_storage(512 * size, StorageKind.PARAMETER, before_step=True) for size in (1, 2)]
    tensors = [(storage, builder.add_tensor(storage)) for storage in storages]
    for number in range(draw(st.integers(1, 5))):
        after = draw(st.integers(-1, number - 1))
        builder.open_scope(f"scope{number}", draw(st.sampled_from(Phase)), thread=draw(st.integers(0, 1)), after=after)
        for _ in range(draw(st.integers(number == 0, 3)) + (number == 0)):
            inputs = [tensor for _, tensor in draw(st.lists(st.sampled_from(tensors), max_size=2))]
            made = draw(st.booleans())
            storage = builder.add_storage(512 * draw(st.integers(0, 9))) if made else draw(st.sampled_from(tensors))[0]
            tensors.append((storage, builder.add_tensor(storage)))
            form = Signature(f"x::op{builder.num_ops}", (spec(3),) * len(inputs), (spec(2),))
            forward = draw(st.integers(-1, builder.num_ops - 1))
            builder.add_op(form, inputs, [tensors[-1][1]], module=f"m{number}", stream=number, forward=forward)
            if draw(st.booleans()) and storage not in storages:
                builder.free_storage(storage)
                tensors = [pair for pair in tensors if pair[0] != storage]
    return builder.build_program()


def check_lifetimes(program: Program) -> None:
    """Every op finds the storages that it touches allocated and not yet freed."""
    c = program.columns
    for op in program.ops:
        for tensor in (*op.inputs, *op.outputs):
            assert c.storage_alloc[tensor.storage] <= op.index <= c.storage_free[tensor.storage]


def as_rows(program: Program) -> ProgramEditor:
    editor = ProgramEditor(program)
    assert len(editor.ops) == program.num_ops
    return editor


@pytest.mark.parametrize("model", ["dlrm-default", "din", "vgg13"])
def test_a_program_that_was_only_looked_at_stays_as_it_is(model: str) -> None:
    program = traincast.load(model).programs[0]
    again = as_rows(program).build()
    same = {name for name in Columns.names()
            if np.array_equal(getattr(again.columns, name), getattr(program.columns, name))}  # fmt: skip
    assert set(Columns.names()) - same <= {"op_signature"}  # numbered anew
    assert [s.name for s in again.scopes] == [s.name for s in program.scopes]
    assert compute_peak_memory(again) == compute_peak_memory(program)
    assert ProgramEditor(program).build() is program


@settings(deadline=None, max_examples=100)
@given(program=programs(), data=st.data())
def test_whatever_ops_are_dropped_the_others_keep_their_order_and_their_memory(program: Program, data: st.DataObject):
    # Given any program and any of its ops
    editor = as_rows(program)
    gone = data.draw(st.sets(st.sampled_from(range(program.num_ops)))) if program.num_ops else set()
    # When they are dropped
    editor.drop_ops({editor.ops[op] for op in gone})
    after = editor.build()
    # Then the rest is valid, in order, and finds its memory
    validate_program(after)
    check_lifetimes(after)
    kept = [op for op in program.ops if op.index not in gone]
    assert [repr(op.signature) for op in after.ops] == [repr(op.signature) for op in kept]
    assert [(op.module, op.stream, op.thread, op.phase) for op in after.ops] == [
        (op.module, op.stream, op.thread, op.phase) for op in kept
    ]
    assert compute_peak_memory(after).peak_bytes <= compute_peak_memory(program).peak_bytes


@settings(deadline=None, max_examples=100)
@given(program=programs(), data=st.data())
def test_scopes_are_dropped_alike_from_columns_and_from_rows(program: Program, data: st.DataObject) -> None:
    # Given any program, and scopes of it that hold ops
    full = [scope.index for scope in program.scopes if scope.num_ops]
    assume(full)
    gone = data.draw(st.sets(st.sampled_from(full), min_size=1))
    # When they are dropped as columns, and op by op
    columns, rows = ProgramEditor(program), as_rows(program)
    columns.drop_scopes(np.isin(np.arange(program.num_scopes), list(gone)))
    rows.drop_ops({op for scope in gone for op in rows.scopes[scope].ops})
    first, second = columns.build(), rows.build()
    # Then the same ops are left, and the same scopes wait for the same ones
    assert first.scopes == second.scopes
    assert [repr(op.signature) for op in first.ops] == [repr(op.signature) for op in second.ops]
    check_lifetimes(first)


def reached(threads: list[int], after: list[int], scopes: list[int]) -> set[tuple[int, int]]:
    """Pairs of scopes of which the first has returned before the second begins."""
    before: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for scope in scopes:
        direct = {last.get(threads[scope], -1), after[scope]} - {-1}
        before[scope] = direct.union(*(before[one] for one in direct))
        last[threads[scope]] = scope
    return {(one, scope) for scope in scopes for one in before[scope]}


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_who_had_to_come_first_still_does_when_scopes_are_dropped(data: st.DataObject) -> None:
    # Given scopes of two threads (the script's and autograd's) that wait for earlier ones of the other
    count = data.draw(st.integers(1, 9))
    threads = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    after = [
        data.draw(st.sampled_from([-1, *(one for one in range(scope) if threads[one] != threads[scope])]))
        for scope in range(count)
    ]
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    # When some are dropped
    waits = move_waits(np.array(threads), np.array(after), np.array(kept)).tolist()
    # Then the others are ordered exactly as before
    left = [scope for scope in range(count) if kept[scope]]
    assert all(waits[scope] < scope and (waits[scope] < 0 or kept[waits[scope]]) for scope in left)
    old = {pair for pair in reached(threads, after, list(range(count))) if all(kept[one] for one in pair)}
    assert reached(threads, waits, left) == old


@settings(deadline=None, max_examples=100)
@given(program=programs(), data=st.data())
def test_a_merged_op_that_touches_all_that_its_members_did_keeps_every_byte(program: Program, data: st.DataObject):
    # Given any two ops of a program
    members = sorted(data.draw(st.sets(st.sampled_from(range(program.num_ops)), min_size=2, max_size=2)))
    editor = as_rows(program)
    rows = [editor.ops[op] for op in members]
    inputs, outputs = (tuple(t for row in rows for t in getattr(row, name)) for name in ("inputs", "outputs"))
    specs = [tuple(s for row in rows for s in getattr(row.signature, name)) for name in ("inputs", "outputs")]
    # When one op stands for both
    gone = editor.merge_ops(members, Signature("x::merged", *specs), inputs, outputs)
    editor.drop_ops(gone)
    after = editor.build()
    # Then there is one op less, where the last one ran, and no byte less
    check_lifetimes(after)
    assert after.num_ops == program.num_ops - 1
    assert after.ops[members[1] - 1].name == "x::merged"
    assert sorted(after.storage_nbytes.tolist()) == sorted(program.storage_nbytes.tolist())


def test_memory_inside_a_merged_op_is_gone_and_the_rest_stays() -> None:
    # Given three ops in a row, on 1, 2 and 4 kB
    builder = ProgramBuilder(batch_size=1)
    storages = [builder.add_storage(512, StorageKind.INPUT, before_step=True)]
    tensors = [builder.add_tensor(storages[0])]
    for size in (1024, 2048, 4096):
        builder.open_scope("aten::relu", Phase.FORWARD)
        tensors.append(builder.add_tensor(builder.add_storage(size)))
        builder.add_op(Signature("aten::relu", (spec(4),), (spec(4),)), tensors[-2:-1], tensors[-1:])
    editor = as_rows(builder.build_program())
    # When the first two become one, which writes what the second one did
    merged = replace(editor.ops[1].signature, name="x::merged")
    editor.drop_ops(editor.merge_ops([0, 1], merged, editor.ops[0].inputs, editor.ops[1].outputs))
    after = editor.build()
    # Then what was between them is gone with the scope of the first
    assert after.storage_nbytes.tolist() == [512, 2048, 4096]
    assert [(op.name, op.scope) for op in after.ops] == [("x::merged", 0), ("aten::relu", 1)]


@settings(deadline=None, max_examples=100)
@given(program=programs(), data=st.data())
def test_what_is_inserted_and_dropped_again_leaves_the_program_as_it_was(program: Program, data: st.DataObject) -> None:
    # Given any program into which scopes and ops are put anywhere
    editor = ProgramEditor(program)
    for place in data.draw(st.lists(st.integers(0, program.num_scopes), min_size=1, max_size=4)):
        editor.insertion.insert_before(place)
        editor.insertion.open_scope("new", Phase.OTHER, thread=7)
        editor.insertion.add_op(NOTHING, [], [])
        if place < program.num_scopes:
            editor.insertion.append_to(place)
            editor.insertion.add_op(NOTHING, [], [])
    more = editor.build()
    validate_program(more)
    assert more.num_ops > program.num_ops
    # When all that is new is dropped
    back = as_rows(more)
    back.drop_ops({op for op in back.ops if op.signature.name == "x::nothing"})
    again = back.build()
    # Then ops, waits and memory are what they were
    assert [repr(op.signature) for op in again.ops] == [repr(op.signature) for op in program.ops]
    if all(scope.num_ops for scope in program.scopes):  # an empty one that was given an op goes with it
        assert again.scopes == program.scopes
    assert compute_peak_memory(again).peak_bytes == compute_peak_memory(program).peak_bytes


def test_the_program_that_is_edited_stays_as_it_is() -> None:
    program, same = make_mlp(batch=8), make_mlp(batch=8)
    editor = as_rows(program)
    editor.drop_ops(set(editor.ops[:3]))
    editor.build()
    columns = ProgramEditor(program)
    columns.rename_scopes(program.columns.scope_phase == Phase.FORWARD, "mine::")
    columns.drop_scopes(program.columns.scope_phase == Phase.BACKWARD)
    columns.insertion.open_scope("new", Phase.OTHER)
    columns.build()
    assert same_program(program, same)


def test_an_edit_keeps_to_columns_or_to_rows() -> None:
    program = make_mlp(batch=8)
    rows, columns = as_rows(program), ProgramEditor(program)
    columns.insertion.open_scope("new", Phase.OTHER)
    for mixed in (lambda: rows.insertion, lambda: rows.drop_scopes(np.ones(8, dtype=bool)), lambda: columns.scopes):
        with pytest.raises(AssertionError, match="columns or to rows"):
            mixed()


def test_copies_of_ops_have_memory_of_their_own_and_share_the_rest() -> None:
    # Given a step of which one op is copied with the memory that it made
    program = make_mlp(batch=8)
    editor = as_rows(program)
    op = editor.ops[1]
    copies = TensorCopies(editor, lambda storage: editor.storages[storage].alloc is op)
    # When its tensors are copied, twice
    inputs, outputs = copies.copy(op.inputs), copies.copy(op.outputs)
    # Then inputs are the same tensors, the result is on new memory of its size, the same both times
    assert inputs == op.inputs
    assert outputs == copies.copy(op.outputs) != op.outputs
    assert editor.get_storage(outputs[0]).size == editor.get_storage(op.outputs[0]).size
    assert editor.tensors[outputs[0]] == copies.storage[editor.tensors[op.outputs[0]]]


def test_an_edit_that_makes_no_program_is_refused() -> None:
    # Given a step whose backward pass is put before its forward pass, when it is built, then the editor says what is
    # wrong
    editor = as_rows(make_mlp(batch=8))
    editor.scopes = editor.scopes[::-1]
    with pytest.raises(TraincastError, match="forward op that comes after it"):
        editor.build()


def test_who_waited_for_merged_scopes_waits_for_what_they_became() -> None:
    # Given a backward pass that waits for the loss
    editor = as_rows(make_mlp(batch=8))
    forward = [scope for scope in editor.scopes if scope.phase in (Phase.FORWARD, Phase.LOSS)]
    one = ScopeRow("all", Phase.FORWARD, 0, [op for scope in forward for op in scope.ops])
    at = editor.scopes.index(forward[0])
    scopes = [*editor.scopes[:at], one, *editor.scopes[at + len(forward) :]]
    # When forward and loss become one scope, then backward waits for it
    editor.merge_scopes(dict.fromkeys(forward, one), scopes)
    after = editor.build()
    assert [(s.name, s.after) for s in after.scopes][1:3] == [("all", -1), ("MmBackward0", 1)]
    assert after.num_ops == make_mlp(batch=8).num_ops


@pytest.mark.parametrize(("phase", "value"), [(Phase.FORWARD, 1), (Phase.BACKWARD, 1.0)])
def test_inserted_arguments_keep_their_type(phase: Phase, value: float) -> None:
    editor = ProgramEditor(make_mlp(batch=8))
    editor.insertion.open_scope("new", phase)
    for other in (1, 1.0, value):
        editor.insertion.add_op(Signature("x::y", (spec(4),), (), (("alpha", other),)), [0], [])
    values = [op.signature.scalars[0][1] for op in editor.build().ops if op.name == "x::y"]
    assert [repr(one) for one in values] == ["1", "1.0", repr(value)]
