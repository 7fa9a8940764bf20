"""Optimizers, against what PyTorch's own run."""

from __future__ import annotations

import pytest

from traincast.ir import Phase, StorageKind
from traincast.models.layers.builder import StepBuilder
from traincast.models.layers.optimizers import (
    LEARNING_RATE,
    TITLES,
    make_optimizer_state,
    write_foreach_step,
    write_single_tensor_step,
    zero_grad,
)

SHAPES = ((8, 4), (8,), (2, 8))
OPTIMIZERS = ("sgd", "adagrad", "adam")
HOST = {"aten::lift_fresh", "aten::_local_scalar_dense"}


def stepped(optimizer, *, together):
    builder = StepBuilder(1)
    parameters = [builder.add_resident_tensor(shape, StorageKind.PARAMETER) for shape in SHAPES]
    grads = [builder.add_resident_tensor(shape, StorageKind.GRADIENT) for shape in SHAPES]
    state = make_optimizer_state(builder, optimizer, parameters)
    (write_foreach_step if together else write_single_tensor_step)(builder, optimizer, state, grads)
    return builder.build_program()


def signatures(program):
    """Names, scalars and shapes of the update, host reads and views apart."""
    return [
        (op.signature.name, op.signature.overload, op.signature.scalars, [t.spec.shape for t in op.inputs])
        for op in program.ops
        if op.phase == Phase.OPTIMIZER and op.name not in HOST
    ]


@pytest.mark.parametrize("together", [True, False], ids=["foreach", "one by one"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_update_is_what_a_capture_of_pytorch_records(optimizer, together):
    torch = pytest.importorskip("torch")
    from traincast.capturing import capture_step
    from traincast_evaluation.zoo.build.steps import OPTIMIZERS as CLASSES

    def make(_):
        parameters = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
        options = {} if together else {"foreach": False}
        chosen = CLASSES[optimizer](parameters, lr=LEARNING_RATE, **options)

        def step():
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            chosen.step()

        return step

    captured = capture_step(make, batch_size=1, name="x", rebatch=False).programs[0]

    assert signatures(stepped(optimizer, together=together)) == signatures(captured)


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("adagrad", 1), ("adam", 2)])
def test_state_is_moments_like_the_parameter_and_a_count_on_the_host(optimizer, moments):
    builder = StepBuilder(1)
    parameter = builder.add_resident_tensor((8, 4), StorageKind.PARAMETER, "bfloat16")

    (state,) = make_optimizer_state(builder, optimizer, [parameter])

    assert [(ref.shape, ref.spec.dtype) for ref in state.moments] == [((8, 4), "bfloat16")] * moments
    assert (state.count is None) == (optimizer == "sgd")
    if state.count is not None:
        assert (state.count.shape, state.count.spec.device) == ((), "cpu")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_leaves_nothing_behind(optimizer, together):
    program = stepped(optimizer, together=together)
    c = program.columns
    made = [s for s in range(len(c.storage_alloc)) if c.storage_alloc[s] >= 0]
    assert all(c.storage_free[s] < program.num_ops for s in made)


def test_one_by_one_a_denominator_lives_until_the_next_one_is_bound():
    program = stepped("adagrad", together=False)
    roots = [op.outputs[0].storage for op in program.ops if op.name == "aten::sqrt"]
    divisions = [op.index for op in program.ops if op.name == "aten::addcdiv_"]
    frees = [int(program.columns.storage_free[storage]) for storage in roots]
    # just before the next parameter's own division; the last one after its own
    assert [free >= division for free, division in zip(frees, divisions, strict=True)] == [True] * 3
    assert frees[0] == divisions[1] - 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zeroed_gradients_are_written_and_dropped_ones_cost_host_time_only(optimizer):
    builder = StepBuilder(1)
    grads = [builder.add_resident_tensor(shape, StorageKind.GRADIENT) for shape in SHAPES]
    zero_grad(builder, optimizer)
    assert builder.build_program().num_ops == 0

    zero_grad(builder, optimizer, grads)

    program = builder.build_program()
    assert [op.name for op in program.ops] == ["aten::zero_"] * 3
    assert {scope.name for scope in program.scopes} == {f"Optimizer.zero_grad#{TITLES[optimizer]}.zero_grad"}
