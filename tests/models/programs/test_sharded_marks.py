"""The writer of a sharded step says what its scopes are for; whoever reads that must not have to guess."""

from __future__ import annotations

import pytest

from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.lower import lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement import Placement, Plan, ShardingKind
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.layout import Mark, ScopeRole, assign_shards_to_ranks
from traincast.models.sharded_dlrm.step import build_sharded_rank_program
from traincast.simulator.schedule import Code, build_schedule

TABLES = [
    Table(name="whole", rows=4000, dim=32, pooling=Pooling.from_constant(3)),
    Table(name="half", rows=4000, dim=32, pooling=Pooling.from_constant(3), dtype="fp16"),
    Table(name="rows", rows=9000, dim=32, pooling=Pooling.from_constant(2), weighted=True),
    Table(name="columns", rows=500, dim=64, pooling=Pooling.from_constant(5)),
    Table(name="node", rows=7000, dim=32, pooling=Pooling.from_constant(1)),
    Table(name="copy", rows=50, dim=32, pooling=Pooling.from_constant(1)),
    Table(name="cached", rows=80_000, dim=32, pooling=Pooling.from_constant(4)),
]
PLAN = Plan(
    tuple(table.name for table in TABLES),
    (
        Placement("table_wise", (0,)),
        Placement("table_wise", (0,)),
        Placement.make_row_wise(4),
        Placement("column_wise", (0, 3)),
        Placement("table_row_wise", (0, 1)),
        Placement.make_data_parallel(4),
        Placement("table_wise", (0,), "fused_uvm_caching", 0.2),
    ),
    4,
)
DENSE = Dense(bottom_mlp=(8, 32), top_mlp=(16, 1), interaction="cat")
LOOKED_UP = ("fbgemm::split_embedding", "fbgemm::dense_embedding")


def _written(dense=DENSE, rank=0):
    layout = assign_shards_to_ranks(TABLES, PLAN, batch_size=64, gpus_per_node=2)
    return build_sharded_rank_program(layout, rank, dense, TABLES)


def _scopes(program):
    return [program.names[number] for number in program.columns.scope_name.tolist()]


def _launches(program):
    """Kernel calls in order of launch, with the scope and the op that each belongs to."""
    lowered = lower_program(program, LoweringContext(framework_version=(2, 13), tf32=False))
    schedule = build_schedule(program, lowered)
    for at in (schedule.code == Code.LAUNCH).nonzero()[0].tolist():
        op = program.symbolic[program.columns.op_signature[schedule.op[at]]].name
        yield lowered.calls[schedule.call[at]], int(schedule.scope[at]), op


def _roles(marks, kind=None, batch=None):
    return [
        mark.role
        for mark in marks
        if mark is not None and (kind is None or mark.kind is kind) and (batch is None or mark.batch == batch)
    ]


def test_every_scope_has_an_entry():
    written = _written()
    assert len(written.marks) == len(_scopes(written.program))


@pytest.mark.parametrize("dense", [None, DENSE])
def test_every_exchange_is_marked(dense):
    written = _written(dense)
    unmarked = [
        op for call, scope, op in _launches(written.program) if call.family is COLLECTIVE and not written.marks[scope]
    ]
    assert unmarked == []


def test_every_kernel_of_the_tables_is_marked():
    """Of all kernels that FBGEMM launches the plan decides how long they take."""
    written = _written()
    unmarked = [
        op for _, scope, op in _launches(written.program) if op.startswith("fbgemm::") and not written.marks[scope]
    ]
    assert unmarked == []


def test_what_the_dense_part_computes_forward_is_not_marked():
    written = _written()
    products = [scope for _, scope, op in _launches(written.program) if op in ("aten::addmm", "aten::relu")]
    assert products
    assert all(written.marks[scope] is None for scope in products)


@pytest.mark.parametrize("role", [ScopeRole.LOOKUP, ScopeRole.UPDATE])
def test_lookups_and_updates_are_those_of_their_batch(role):
    """One kernel for each batch of the rank, marked with the kind and the number of that batch."""
    written = _written()
    marked = [
        (written.marks[scope].kind, written.marks[scope].batch)
        for call, scope, op in _launches(written.program)
        if op.startswith(LOOKED_UP) and call.kind.startswith("tbe_") and written.marks[scope].role is role
    ]
    expected = [
        (kind, number)
        for kind, count in (
            (ShardingKind.TABLE_WISE, 3),
            (ShardingKind.ROW_WISE, 1),
            (ShardingKind.COLUMN_WISE, 1),
            (ShardingKind.TABLE_ROW_WISE, 1),
            (ShardingKind.DATA_PARALLEL, 1),
        )
        for number in range(count)
    ]
    assert sorted(marked) == sorted(expected)


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        (
            ShardingKind.TABLE_WISE,
            {ScopeRole.SIZES, ScopeRole.LENGTHS, ScopeRole.VALUES, ScopeRole.OUT, ScopeRole.BACK},
        ),
        (ShardingKind.ROW_WISE, {ScopeRole.SIZES, ScopeRole.LENGTHS, ScopeRole.VALUES, ScopeRole.OUT, ScopeRole.BACK}),
        (
            ShardingKind.TABLE_ROW_WISE,
            {
                ScopeRole.SIZES,
                ScopeRole.LENGTHS,
                ScopeRole.VALUES,
                ScopeRole.OUT,
                ScopeRole.OUT_ACROSS,
                ScopeRole.BACK,
                ScopeRole.BACK_WITHIN,
            },
        ),
        (ShardingKind.DATA_PARALLEL, {ScopeRole.UPDATE}),
        (None, {ScopeRole.DENSE}),
    ],
)
def test_exchanges_of_a_kind(kind, roles):
    written = _written()
    marks = [written.marks[scope] for call, scope, _ in _launches(written.program) if call.family is COLLECTIVE]
    assert {mark.role for mark in marks if mark.kind is kind} == roles


def test_row_numbers_and_weights_are_told_apart():
    """Lookups of all tables travel together, so one weighted table makes all collectives carry weights."""
    written = _written()
    numbers = [
        written.marks[scope].number
        for call, scope, _ in _launches(written.program)
        if call.family is COLLECTIVE and written.marks[scope].role is ScopeRole.VALUES
    ]
    assert numbers == [0, 1] * 4


def test_only_kinds_that_are_cut_by_rows_are_bucketed():
    assert [mark.kind for mark in _written().marks if mark and mark.role is ScopeRole.BUCKET] == [
        ShardingKind.ROW_WISE,
        ShardingKind.TABLE_ROW_WISE,
    ]


def test_several_kernels_of_a_kind_are_joined_and_parted():
    roles = _roles(_written().marks, ShardingKind.TABLE_WISE)
    assert roles.count(ScopeRole.BESIDE) == roles.count(ScopeRole.PART) == 1
    roles = _roles(_written().marks, ShardingKind.COLUMN_WISE)
    assert ScopeRole.BESIDE not in roles
    assert ScopeRole.PART not in roles


def test_a_rank_without_tables_of_a_kind_has_no_lookup_of_it():
    roles = _roles(_written(rank=1).marks, ShardingKind.TABLE_WISE)
    assert {ScopeRole.LOOKUP, ScopeRole.UPDATE, ScopeRole.ARRIVE, ScopeRole.FLATTEN, ScopeRole.SHAPE}.isdisjoint(roles)
    assert {ScopeRole.OUT, ScopeRole.BACK, ScopeRole.JOIN, ScopeRole.VIEW} <= set(roles)


def test_the_optimizer_of_copied_tables_is_theirs_and_that_of_the_dense_part_nobodys():
    written = _written()
    steps = [
        mark for name, mark in zip(_scopes(written.program), written.marks, strict=True) if "Optimizer.step" in name
    ]
    assert steps == [None, Mark(ScopeRole.STEP, ShardingKind.DATA_PARALLEL, 0)]


def test_marks_are_no_part_of_the_program():
    """A rank like another takes only sizes from its ops, and is marked as the other is."""
    layout = assign_shards_to_ranks(TABLES, PLAN, batch_size=64, gpus_per_node=2)
    first = build_sharded_rank_program(layout, 0, DENSE, TABLES)
    again = build_sharded_rank_program(layout, 0, DENSE, TABLES, like=first.program)
    assert again.marks == first.marks
    assert (again.program.columns.op_signature == first.program.columns.op_signature).all()
