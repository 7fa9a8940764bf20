"""The process groups of a rank, its all-to-alls, and inputs that the loop holds."""

from __future__ import annotations

import pytest

from traincast.ir import Phase, StorageKind
from traincast.models.layers.builder import RankBuilder
from traincast.models.sharded_dlrm.layout import Mark, MarkedProgram, ScopeRole


@pytest.mark.parametrize(
    ("rank", "within", "across"),
    [
        (0, (1, (0, 1, 2, 3)), (3, (0, 4))),
        (3, (1, (0, 1, 2, 3)), (6, (3, 7))),
        (6, (2, (4, 5, 6, 7)), (5, (2, 6))),
    ],
)
def test_groups_are_numbered_as_new_group_does(rank, within, across):
    # Given two nodes of four GPUs: group 0 is all, then one per node, then one per place in the nodes
    builder = RankBuilder(16, rank, 8, 4)

    assert (builder.world.number, builder.world.ranks) == (0, tuple(range(8)))
    assert (builder.within.number, builder.within.ranks) == within
    assert (builder.across.number, builder.across.ranks) == across


def test_a_node_that_is_not_full_has_fewer_mates():
    assert RankBuilder(1, 2, 3, 8).within.ranks == (0, 1, 2)
    assert RankBuilder(1, 2, 3, 8).across.ranks == (2,)


def all_to_all(send, receive, dtype="float32"):
    builder = RankBuilder(4, 0, 2, 2)
    builder.open_scope("c10d::alltoall_base_", Phase.FORWARD)
    source = builder.add_resident_tensor((sum(send),), StorageKind.BUFFER, dtype)
    output = builder.add_tensor((sum(receive),), dtype)
    event = builder.add_all_to_all(builder.world, source, output, send, receive)
    (op,) = [op for op in builder.build_program().ops if op.name == "c10d::alltoall_base_"]
    return event, op.signature


def test_an_even_all_to_all_needs_no_splits():
    event, signature = all_to_all([6, 6], [6, 6], "float16")
    assert event == 1
    assert signature.scalar("collective") == "all_to_all"
    assert signature.scalar("bytes") == 24
    assert signature.scalar("send_splits") is None


def test_an_uneven_all_to_all_says_its_bytes_to_and_from_every_rank():
    _, signature = all_to_all([4, 2], [4, 9])
    assert signature.scalar("collective") == "all_to_all_v"
    assert signature.scalar("send_splits") == (16, 8)
    assert signature.scalar("recv_splits") == (16, 36)


def test_inputs_are_held_by_the_loop_to_the_end_of_the_step():
    builder = RankBuilder(4, 0, 1, 1)
    held = builder.add_input_copy((4, 13), "float32")
    other = builder.add_tensor((4,))
    builder.add_op("aten::ones", [], [other])
    builder.free_tensors(held, other)

    program = builder.build_program()

    assert program.ops[0].signature.scalar("non_blocking") is True
    assert program.columns.storage_free[held.storage] == program.num_ops
    assert program.columns.storage_free[other.storage] == program.num_ops - 1


def step(builder, size):
    builder.open_scope("aten::relu", Phase.FORWARD)
    given = builder.add_resident_tensor((size,), StorageKind.INPUT)
    builder.add_op("aten::relu", [("self", given)], [builder.add_tensor((size,))])
    return builder.build_program()


def test_a_rank_that_runs_the_same_ops_takes_only_its_sizes():
    first = step(RankBuilder(4, 0, 2, 2), 100)

    second = step(RankBuilder(4, 1, 2, 2, like=first), 7)

    assert second.columns is first.columns
    assert [program.ops[0].outputs[0].spec.shape for program in (first, second)] == [(100,), (7,)]


def test_a_rank_that_runs_other_ops_is_a_mistake():
    first = step(RankBuilder(4, 0, 2, 2), 100)
    builder = RankBuilder(4, 1, 2, 2, like=first)
    builder.open_scope("aten::relu", Phase.FORWARD)
    with pytest.raises(AssertionError, match="not written like its template"):
        builder.build_program()


def test_scopes_carry_the_mark_they_were_opened_under():
    builder = RankBuilder(4, 0, 1, 1)
    builder.open_scope("aten::to", Phase.FORWARD)
    with builder.label_scopes(Mark(ScopeRole.LOOKUP, batch=1)):
        builder.open_scope("SplitLookupFunction")
        with builder.label_scopes(Mark(ScopeRole.DENSE)):
            builder.open_engine_scope("aten::as_strided", Phase.BACKWARD)
        builder.open_scope("aten::view")
    builder.open_scope("aten::cat")

    marked = MarkedProgram.from_builder(builder)

    assert len(marked.marks) == marked.program.num_scopes
    lookup, dense = Mark(ScopeRole.LOOKUP, batch=1), Mark(ScopeRole.DENSE)
    assert list(marked.marks) == [None, lookup, dense, lookup, None]
