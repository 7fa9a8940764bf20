from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import calls
from tests.ir.steps import make_mlp, make_workload, spec
from tests.ir.test_file import programs
from traincast.ir import Phase, Program, ProgramBuilder, Signature, StorageKind, Workload, compute_peak_memory
from traincast.ir.editor import remove_phase, rename_dtypes
from traincast.ir.generalise import capture_sizes, generalise_captures
from traincast.ir.validate import validate_program
from traincast.utils.errors import TraincastError

TO_INT32 = {"float32": "int32"}
RELU = Signature("aten::relu", (spec(128),), (spec(128),))


def edited(program: Program, phase: Phase) -> Program:
    return remove_phase(Workload(name="w", programs=(program,)), phase).programs[0]


def test_without_the_optimizer_the_rest_of_the_step_is_the_same() -> None:
    before = make_mlp(batch=8)
    after = edited(before, Phase.OPTIMIZER)
    validate_program(after)
    assert after.ops == before.ops[:-1]
    assert [s.name for s in after.scopes] == [s.name for s in before.scopes if s.phase != Phase.OPTIMIZER]
    assert all(s.name != "aten::_foreach_add_" for s in after.symbolic)


def test_who_ran_after_a_dropped_scope_inherits_its_wait() -> None:
    # Given an optimizer that waits for the last backward scope (5), and zero_grad after it on the same thread
    before = make_mlp(batch=8)
    assert [s.after for s in before.scopes] == [-1, -1, -1, -1, 3, -1, 5, -1]
    # When the optimizer is left out, then zero_grad waits for the backward pass
    assert [s.after for s in edited(before, Phase.OPTIMIZER).scopes] == [-1, -1, -1, -1, 3, -1, 5]


def test_who_waited_for_a_dropped_scope_waits_for_what_ran_before_it() -> None:
    # Given a backward pass that waits for the loss (3); without the loss, it waits for the last linear layer (2)
    after = edited(make_mlp(batch=8), Phase.LOSS)
    validate_program(after)
    assert [(s.name, s.after) for s in after.scopes][3:6] == [
        ("MmBackward0", 2), ("MmBackward0", -1), ("Optimizer.step#SGD.step", 4),
    ]  # fmt: skip


def test_without_backward_nothing_waits_for_the_autograd_thread() -> None:
    after = edited(make_mlp(batch=8), Phase.BACKWARD)
    validate_program(after)
    assert [s.after for s in after.scopes] == [-1] * 6
    assert [op.forward for op in after.ops] == [-1] * 5


def test_a_link_to_a_dropped_forward_op_is_cut() -> None:
    after = edited(make_mlp(batch=8), Phase.FORWARD)
    validate_program(after)
    assert [op.forward for op in after.ops] == [-1] * 5
    without_input = edited(make_mlp(batch=8), Phase.INPUT)
    assert [op.forward for op in without_input.ops] == [-1, -1, -1, 1, 0, -1]


def optimizer_step() -> Program:
    """A step of one op whose optimizer has momentum (4096 bytes) and a temporary (8192 bytes)."""
    b = ProgramBuilder(batch_size=1)
    weight = b.add_tensor(b.add_storage(512, StorageKind.PARAMETER, before_step=True))
    momentum = b.add_tensor(b.add_storage(4096, StorageKind.OPTIMIZER_STATE, before_step=True))
    unused = b.add_storage(1024, StorageKind.PARAMETER, before_step=True)
    b.open_scope("aten::relu", Phase.BACKWARD)
    gradient = b.add_storage(512, StorageKind.GRADIENT)
    grad = b.add_tensor(gradient)
    b.add_op(RELU, [weight], [grad])
    b.open_scope("Optimizer.step#SGD.step", Phase.OPTIMIZER)
    temporary = b.add_storage(8192)
    b.add_op(RELU, [grad], [b.add_tensor(temporary)])
    b.free_storage(temporary)
    b.add_op(Signature("aten::add_", (spec(128), spec(128)), (spec(128),)), [weight, momentum], [weight])
    b.free_storage(gradient)
    b.open_scope("aten::relu", Phase.OTHER)
    b.add_op(RELU, [weight], [b.add_tensor(b.add_storage(512))])
    assert unused == 2
    return b.build_program()


def test_memory_that_only_the_optimizer_used_goes_with_it() -> None:
    before = optimizer_step()
    assert compute_peak_memory(before).peak_bytes == 512 + 4096 + 1024 + 512 + 8192
    after = edited(before, Phase.OPTIMIZER)
    validate_program(after)
    # Then weight, unused parameter and gradient stay; the gradient, freed in the optimizer, ends with the last op kept
    assert compute_peak_memory(after).by_kind == {"parameter": 1536, "gradient": 512}
    assert after.columns.storage_alloc.tolist() == [-1, -1, 0, 1]
    assert after.columns.storage_free.tolist() == [2, 2, 0, 2]


def test_a_host_batch_that_is_no_longer_copied_is_not_taken_for_device_memory() -> None:
    before = make_mlp(batch=1000)
    after = edited(before, Phase.INPUT)
    validate_program(after)
    assert len(after.columns.storage_bytes) == len(before.columns.storage_bytes) - 1
    assert compute_peak_memory(after).peak_bytes == compute_peak_memory(before).peak_bytes


@settings(deadline=None, max_examples=60)
@given(program=programs(), phase=st.sampled_from(Phase))
def test_any_program_without_any_phase_is_valid_and_keeps_its_other_ops(program: Program, phase: Phase) -> None:
    after = edited(program, phase)
    validate_program(after)
    kept = [op for op in program.ops if op.phase != phase]
    assert [repr(op.signature) for op in after.ops] == [repr(op.signature) for op in kept]
    assert [[t.spec for t in op.inputs] for op in after.ops] == [[t.spec for t in op.inputs] for op in kept]
    assert len({t.id for op in after.ops for t in op.inputs}) == len({t.id for op in kept for t in op.inputs})
    assert [(op.module, op.stream, op.thread) for op in after.ops] == [(o.module, o.stream, o.thread) for o in kept]
    assert compute_peak_memory(after).peak_bytes <= compute_peak_memory(program).peak_bytes


def test_a_phase_that_is_not_there_changes_nothing() -> None:
    workload = make_workload()
    inference = remove_phase(workload, Phase.OPTIMIZER)
    assert remove_phase(inference, Phase.OPTIMIZER).programs[0] is inference.programs[0]


def test_an_edited_program_can_still_be_resized() -> None:
    program = generalise_captures([make_mlp(batch=b) for b, _ in capture_sizes(8, 0)])
    after = edited(program, Phase.OPTIMIZER).resized(100, 0)
    assert after.ops == edited(make_mlp(batch=100), Phase.OPTIMIZER).ops


def test_a_type_is_renamed_in_tensors_and_arguments() -> None:
    b = ProgramBuilder(batch_size=1)
    b.open_scope("aten::to", Phase.FORWARD)
    tensor = b.add_tensor(b.add_storage(512))
    half = spec(4, dtype="bfloat16")
    scalars = (("dtype", "torch.bfloat16"), ("other", "bfloat16"), ("mode", "bfloat16s"))
    b.add_op(Signature("aten::to", (spec(4), half), (half,), scalars), [tensor, tensor], [tensor])
    workload = rename_dtypes(Workload(name="w", programs=(b.build_program(),)), {"bfloat16": "float16"})
    signature = workload.programs[0].ops[0].signature
    assert [s.dtype for s in (*signature.inputs, *signature.outputs)] == ["float32", "float16", "float16"]
    assert [value for _, value in signature.scalars] == ["torch.float16", "float16", "bfloat16s"]


def test_signatures_that_become_equal_are_merged() -> None:
    b = ProgramBuilder(batch_size=1)
    b.open_scope("aten::relu", Phase.FORWARD)
    tensor = b.add_tensor(b.add_storage(512))
    for dtype in ("bfloat16", "float16"):
        b.add_op(Signature("aten::relu", (spec(4, dtype=dtype),), ()), [tensor], [])
    program = rename_dtypes(Workload(name="w", programs=(b.build_program(),)), {"bfloat16": "float16"}).programs[0]
    assert len(program.symbolic) == 1
    assert program.columns.op_signature.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("renames", "message"),
    [
        ({"float32": "float16"}, "float32 cannot become float16"),
        ({"bf16": "float16"}, r"unknown dtype 'bf16'\. Did you mean"),
        ({"bfloat16": "half"}, "unknown dtype 'half'"),
    ],
)
def test_a_rename_that_cannot_be_is_refused(renames: dict[str, str], message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        rename_dtypes(make_workload(), renames)


@pytest.mark.parametrize(
    "edit",
    [lambda workload: remove_phase(workload, Phase.OPTIMIZER), lambda workload: rename_dtypes(workload, TO_INT32)],
    ids=["phase", "dtype"],
)
def test_thousands_of_ops_are_edited_together(edit: Callable[[Workload], Workload]) -> None:
    workload = make_workload(layers=2000)
    workload = replace(workload, programs=(replace(workload.programs[0]),))
    edit(workload)
    assert calls(lambda: edit(workload)) < 10 * workload.programs[0].num_ops, "some milliseconds"
