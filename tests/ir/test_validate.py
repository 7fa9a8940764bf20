from dataclasses import replace

import numpy as np
import pytest

from tests.effort import calls
from tests.ir.steps import make_mlp, make_workload, spec
from traincast.ir import Phase, Program, ProgramBuilder, Signature, TensorSpec, Workload
from traincast.ir.sizes import SizeTable
from traincast.ir.validate import MAX_ALL_OPS, MAX_OPS, MAX_RANKS, validate_program, validate_workload
from traincast.models.catalog import load_model
from traincast.utils.errors import TraincastError

STEP = make_mlp(batch=8)


def with_column(name: str, place: int, value: int) -> Program:
    column = getattr(STEP.columns, name).copy()
    column[place] = value
    return replace(STEP, columns=replace(STEP.columns, **{name: column}))


def with_signature(**changes) -> Program:
    """The step whose first GEMM (op 1) has a changed signature."""
    number = int(STEP.columns.op_signature[1])
    changed = [replace(s, **changes) if i == number else s for i, s in enumerate(STEP.symbolic)]
    return replace(STEP, symbolic=tuple(changed))


def test_what_the_builder_makes_is_valid() -> None:
    validate_program(STEP)
    validate_program(ProgramBuilder(batch_size=1).build_program())
    validate_workload(make_workload(seq=16))


@pytest.mark.parametrize(
    ("column", "place", "value", "message"),
    [
        ("op_signature", 3, 99, "column op_signature is 99 at entry 3, not from 0 to 4"),
        ("op_module", 0, -1, "column op_module is -1 at entry 0"),
        ("op_forward", 4, 7, "column op_forward is 7 at entry 4"),
        ("op_forward", 4, 5, r"op 4 \('aten::mm'\) has a forward op that comes after it"),
        ("op_forward", 4, 4, "has a forward op that comes after it"),
        ("op_stream", 2, -1, "column op_stream is -1 at entry 2"),
        ("input_ptr", 0, 1, "column input_ptr runs from 1 to"),
        ("input_ptr", -1, 3, "column input_ptr runs from 0 to 3"),
        ("input_ptr", 2, 0, "column input_ptr falls after entry 1"),
        ("input_ptr", 2, 2, r"op 1 \('aten::mm'\) has 1 inputs, its signature 2"),
        ("output_ptr", 1, 0, r"op 0 \('aten::_to_copy'\) has 0 outputs, its signature 1"),
        ("input_tensor", 0, 1000, "column input_tensor is 1000 at entry 0"),
        ("output_tensor", 0, -2, "column output_tensor is -2 at entry 0"),
        ("tensor_storage", 1, 1000, "column tensor_storage is 1000 at entry 1"),
        ("storage_bytes", 1, 1000, "column storage_bytes is 1000 at entry 1"),
        ("storage_kind", 1, 6, "column storage_kind is 6 at entry 1, not from 0 to 5"),
        ("storage_alloc", 1, 9, "column storage_alloc is 9 at entry 1"),
        ("storage_free", 4, 0, "storage 4 is freed before it is allocated"),
        ("scope_name", 1, 1000, "column scope_name is 1000 at entry 1"),
        ("scope_phase", 1, 6, "column scope_phase is 6 at entry 1, not from 0 to 5"),
        ("scope_thread", 1, -1, "column scope_thread is -1 at entry 1"),
        ("scope_after", 4, 6, "scope 4 waits for a scope that comes after it"),
        ("scope_ptr", 1, 5, "column scope_ptr falls after entry 1"),
    ],
)
def test_a_wrong_number_is_named(column: str, place: int, value: int, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        validate_program(with_column(column, place, value))


@pytest.mark.parametrize("column", ["op_stream", "scope_after", "storage_free", "input_ptr", "scope_ptr"])
def test_columns_of_unequal_length_are_named(column: str) -> None:
    short = replace(STEP.columns, **{column: getattr(STEP.columns, column)[:-1]})
    with pytest.raises(TraincastError, match=f"column {column} has "):
        validate_program(replace(STEP, columns=short))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": (TensorSpec((0,), (0, 0), "float32"),)}, "1 dimensions and 2 strides"),
        ({"outputs": (TensorSpec((0,), (0,), "float31"),)}, "unknown dtype 'float31'"),
        ({"outputs": (TensorSpec((0,), (0,), "float32", "tpu"),)}, "unknown device 'tpu'; known are cuda"),
        ({"outputs": (TensorSpec((999,), (0,), "float32"),)}, "a size that is not in the table of 7"),
        ({"outputs": (TensorSpec((-1,), (0,), "float32"),)}, "a size that is not in the table of 7"),
        ({"groups": (("self", 1),)}, "groups 1 tensors but has 2 inputs"),
        ({"groups": (("self", 3), ("other", -1))}, "groups 2 tensors but has 2 inputs"),
    ],
)
def test_a_wrong_signature_is_named_with_its_op(changes: dict, message: str) -> None:
    with pytest.raises(TraincastError, match=rf"op 1 \('aten::mm'\) .*{message}"):
        validate_program(with_signature(**changes))


def test_an_unused_signature_is_checked_too() -> None:
    unused = Signature("aten::odd", (TensorSpec((0,), (), "float32"),), ())
    with pytest.raises(TraincastError, match=r"signature 5 \('aten::odd'\)"):
        validate_program(replace(STEP, symbolic=(*STEP.symbolic, unused)))


def test_a_negative_dimension_is_refused() -> None:
    builder = ProgramBuilder(batch_size=1)
    builder.open_scope("aten::relu", Phase.FORWARD)
    builder.add_op(
        Signature("aten::relu", (), (TensorSpec((-4,), (1,), "float32"),)),
        [],
        [builder.add_tensor(builder.add_storage(8))],
    )
    with pytest.raises(TraincastError, match=r"op 0 \('aten::relu'\) has a tensor with a negative size"):
        validate_program(builder.build_program())


def test_a_negative_storage_is_refused() -> None:
    builder = ProgramBuilder(batch_size=1)
    builder.add_storage(-1)
    with pytest.raises(TraincastError, match="storage 0 has a negative number of bytes"):
        validate_program(builder.build_program())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch size 0"),
        ({"batch_size": 10**12}, "batch size 10"),
        ({"seq_len": -1}, "sequence length -1"),
        ({"sizes": SizeTable(STEP.sizes.coefficients[:, :5], STEP.sizes.denominator)}, "the size table has"),
        ({"sizes": SizeTable(STEP.sizes.coefficients, STEP.sizes.denominator * 0)}, "size 0 has a denominator below 1"),
        ({"sizes": replace(STEP.sizes, seq_multiple=STEP.sizes.denominator * 0)}, "size 0 has an impossible multiple"),
        ({"sizes": replace(STEP.sizes, seq_multiple=STEP.sizes.denominator[:2])}, "the size table has .* 2 multiples"),
    ],
)
def test_wrong_sizes_are_named(changes: dict, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        validate_program(replace(STEP, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": ()}, "no rank"),
        ({"programs": ()}, "no program"),
        ({"ranks": (0, 1)}, "rank 1 runs program 1, but there are 1 programs"),
        ({"ranks": (-1,)}, "rank 0 runs program -1"),
        ({"programs": (STEP, make_mlp(batch=9))}, "program 1 has batch size 9"),
        ({"programs": (STEP, with_column("op_stream", 0, -1))}, "program 1: column op_stream"),
    ],
)
def test_a_wrong_workload_is_named(changes: dict, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        validate_workload(replace(make_workload(), **changes))


def test_thousands_of_ops_are_checked_together() -> None:
    builder = ProgramBuilder(batch_size=4)
    tensors = [builder.add_tensor(builder.add_storage(64)) for _ in range(100)]
    for i in range(4000):
        builder.open_scope("aten::mm", Phase.FORWARD)
        signature = Signature(
            "aten::mm", (spec(i % 300, 8), spec(8, 4)), (spec(i % 300, 4),), (("a", 1), ("b", (1, 2)))
        )
        builder.add_op(signature, [tensors[i % 100], tensors[0]], [tensors[1]])
    workload = Workload(name="w", programs=(builder.build_program(),))
    validate_workload(workload)
    assert calls(lambda: validate_workload(workload)) < 10 * 4000, "some milliseconds"
    assert isinstance(workload.programs[0].size_values, np.ndarray)


def test_a_step_of_millions_of_empty_scopes_is_refused():
    """They are a few kilobytes in a file, and took gigabytes and minutes to walk."""
    program = load_model("dlrm-ddp", mode="inference").programs[0]
    c, many = program.columns, MAX_OPS
    bomb = replace(
        c,
        scope_name=np.append(c.scope_name, np.zeros(many, dtype=np.int32)),
        scope_phase=np.append(c.scope_phase, np.zeros(many, dtype=np.int32)),
        scope_thread=np.append(c.scope_thread, np.zeros(many, dtype=np.int32)),
        scope_after=np.append(c.scope_after, np.full(many, -1, dtype=np.int32)),
        scope_ptr=np.append(c.scope_ptr, np.full(many, c.scope_ptr[-1], dtype=np.int32)),
    )
    with pytest.raises(TraincastError, match=f"more than {MAX_OPS} ops, scopes or storages"):
        validate_program(replace(program, columns=bomb))


def test_very_many_ranks_and_programs_are_refused():
    workload = load_model("dlrm-ddp", mode="inference")
    program = workload.programs[0]
    with pytest.raises(TraincastError, match="ranks; at most"):
        validate_workload(replace(workload, ranks=(0,) * (MAX_RANKS + 1)))
    copies = MAX_ALL_OPS // program.num_scopes + 2
    with pytest.raises(TraincastError, match=f"more than {MAX_ALL_OPS} ops or scopes together"):
        validate_workload(replace(workload, programs=(program,) * copies))
