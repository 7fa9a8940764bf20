import pytest

from tests.ir.steps import make_mlp, spec
from traincast.ir import Phase, ProgramBuilder, Signature, StorageKind
from traincast.ir.validate import validate_program

RELU = Signature("aten::relu", (spec(4),), (spec(4),))


def test_equal_signatures_are_kept_once() -> None:
    program = make_mlp(batch=8, layers=5)
    assert program.num_ops == 13
    assert len(program.symbolic) == 5


def test_an_op_needs_a_scope() -> None:
    with pytest.raises(AssertionError, match="scope"):
        ProgramBuilder(batch_size=1).add_op(RELU, [0], [0])


def test_a_storage_freed_before_the_first_op_does_not_outlive_the_step() -> None:
    builder = ProgramBuilder(batch_size=1)
    early = builder.add_storage(512, before_step=True)
    builder.free_storage(early)
    late = builder.add_storage(512)
    builder.free_storage(late)
    builder.open_scope("aten::relu", Phase.FORWARD)
    tensor = builder.add_tensor(builder.add_storage(512))
    builder.add_op(RELU, [tensor], [tensor])
    program = builder.build_program()
    assert program.columns.storage_free.tolist() == [-1, 0, 1]
    validate_program(program)


def test_a_storage_can_change_its_kind() -> None:
    builder = ProgramBuilder(batch_size=1)
    builder.set_kind(builder.add_storage(8), StorageKind.GRADIENT)
    assert builder.build_program().columns.storage_kind.tolist() == [StorageKind.GRADIENT]


def test_scopes_may_be_empty_and_ops_go_to_the_last_one() -> None:
    builder = ProgramBuilder(batch_size=1)
    tensor = builder.add_tensor(builder.add_storage(16))
    builder.open_scope("first", Phase.OTHER)
    builder.open_scope("second", Phase.FORWARD)
    builder.add_op(RELU, [tensor], [tensor])
    builder.open_scope("third", Phase.OTHER, thread=1, after=1)
    program = builder.build_program()
    assert [(s.name, s.num_ops, s.after) for s in program.scopes] == [
        ("first", 0, -1),
        ("second", 1, -1),
        ("third", 0, 1),
    ]


def test_a_lifetime_can_be_set_afterwards() -> None:
    builder = ProgramBuilder(batch_size=1)
    kept, freed = builder.add_storage(512), builder.add_storage(512)
    builder.open_scope("aten::relu", Phase.FORWARD)
    tensor = builder.add_tensor(kept)
    for _ in range(3):
        builder.add_op(RELU, [tensor], [tensor])
    builder.set_lifetime(kept, -1, None)
    builder.set_lifetime(freed, 1, 2)
    columns = builder.build_program().columns
    assert (columns.storage_alloc.tolist(), columns.storage_free.tolist()) == ([-1, 1], [3, 2])
