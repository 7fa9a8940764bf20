"""MLPs, losses and interactions: shapes, order, lifetimes and casts."""

from __future__ import annotations

import pytest

from traincast.ir import Phase, StorageKind
from traincast.models.data_parallel.data_parallel import Reducer
from traincast.models.layers.builder import RankBuilder, StepBuilder
from traincast.models.layers.interaction import (
    write_concatenate_backward,
    write_concatenation,
    write_dot,
    write_dot_backward,
)
from traincast.models.layers.mlp import LOSSES, Mlp, write_backward_start, write_loss_backward, write_loss_forward

BATCH, WIDTHS = 32, (10, 20, 5)


def flops(program, phase):
    """Multiplications of all GEMMs."""
    products = [op for op in program.ops if op.phase == phase and op.name in ("aten::addmm", "aten::mm")]
    return sum(op.inputs[-2].spec.numel * op.inputs[-1].spec.shape[1] for op in products)


def trained(*, input_grad, last="relu", half="", apart=False):
    """Forward and backward of an MLP whose gradients are added to those of the step before."""
    builder = StepBuilder(BATCH)
    builder.half, builder.engine_ops_apart = half, apart
    mlp = Mlp(builder, "Model.mlp", WIDTHS, last=last, input_grad=input_grad, gradients=True)
    x = builder.add_input_copy((BATCH, WIDTHS[0]), "float32")
    result = mlp.write_forward(x)
    builder.open_scope("aten::ones_like", Phase.BACKWARD)
    grad = builder.add_tensor(result.shape, result.spec.dtype)
    builder.add_op("aten::ones_like", [("self", result)], [grad])
    below = mlp.write_backward(grad)
    return builder.build_program(), mlp, below


def test_every_layer_is_a_product_and_its_activation():
    program, _, _ = trained(input_grad=True, last="sigmoid")
    forward = [(op.name, op.module) for op in program.ops if op.phase == Phase.FORWARD]
    assert forward == [
        ("aten::t", "Model.mlp.0"),
        ("aten::addmm", "Model.mlp.0"),
        ("aten::relu", "Model.mlp.1"),
        ("aten::t", "Model.mlp.2"),
        ("aten::addmm", "Model.mlp.2"),
        ("aten::sigmoid", "Model.mlp.3"),
    ]


@pytest.mark.parametrize("input_grad", [True, False])
def test_backward_has_two_products_per_layer_but_for_an_input_without_gradient(input_grad):
    program, _, below = trained(input_grad=input_grad)

    forward = BATCH * (10 * 20 + 20 * 5)

    assert flops(program, Phase.FORWARD) == forward
    assert flops(program, Phase.BACKWARD) == 2 * forward - (0 if input_grad else BATCH * 10 * 20)
    assert below.shape == ((BATCH, 10) if input_grad else (BATCH, 20))


def test_gradients_come_last_layer_first_and_bias_before_weight():
    program, mlp, _ = trained(input_grad=True)
    added = [op.outputs[0].spec.shape for op in program.ops if op.name == "aten::add_"]
    assert added == [(5,), (5, 20), (20,), (20, 10)]
    assert [spec.shape for spec in mlp.list_gradient_specs()] == added
    assert [ref.shape for ref in mlp.list_parameters()] == [(20, 10), (20,), (5, 20), (5,)]
    assert [ref.shape for ref in mlp.list_gradients()] == [(20, 10), (20,), (5, 20), (5,)]


def test_an_mlp_without_a_last_activation_ends_in_its_product():
    program, mlp, _ = trained(input_grad=True, last="")
    assert [op.name for op in program.ops if op.phase == Phase.FORWARD][-1] == "aten::addmm"
    backward = [scope.name for scope in program.scopes if scope.name.endswith("Backward0")]
    assert backward == ["AddmmBackward0", "TBackward0", "ReluBackward0", "AddmmBackward0", "TBackward0"]
    assert mlp.layers[-1].ops[2] == -1


def test_backward_ops_know_their_forward_op():
    program, mlp, _ = trained(input_grad=True)
    forwards = {op.forward for op in program.ops if op.name in ("aten::mm", "aten::threshold_backward")}
    assert forwards == {op for layer in mlp.layers for op in layer.ops[1:]}


@pytest.mark.parametrize(("apart", "scopes"), [(True, 2), (False, 0)])
def test_sums_of_the_engine_are_host_ops_of_their_own_in_pytorch_1_8(apart, scopes):
    program, _, _ = trained(input_grad=True, apart=apart)
    assert [scope.name for scope in program.scopes].count("aten::sum") == scopes
    assert [op.name for op in program.ops].count("aten::sum") == 2


def test_nothing_but_gradients_and_parameters_is_left_after_backward():
    program, _, below = trained(input_grad=True)
    c = program.columns
    left = {
        int(storage)
        for storage, (kind, free) in enumerate(zip(c.storage_kind, c.storage_free, strict=True))
        if free == program.num_ops and kind == StorageKind.ACTIVATION and program.storage_nbytes[storage]
    }
    assert left == {below.storage}


def test_inference_frees_every_result_once_it_was_used():
    builder = StepBuilder(BATCH)
    mlp = Mlp(builder, "Model.mlp", (10, 20, 30, 5), input_grad=False)
    x = builder.add_input_copy((BATCH, 10), "float32")

    result = mlp.write_forward(x, keep=False)

    program = builder.build_program()
    alive = program.columns.storage_free == program.num_ops
    kept = [s for s in range(len(alive)) if alive[s] and program.columns.storage_kind[s] == StorageKind.ACTIVATION]
    assert kept == [x.storage, result.storage]


def test_autocast_casts_bias_weight_and_input_and_gradients_back():
    program, mlp, _ = trained(input_grad=True, half="bfloat16")

    products = [op for op in program.ops if op.name in ("aten::addmm", "aten::mm")]
    assert {tensor.spec.dtype for op in products for tensor in op.inputs} == {"bfloat16"}
    casts = [op for op in program.ops if op.name == "aten::_to_copy" and op.phase == Phase.FORWARD]
    assert len(casts) == 5, "two layers; the second one is given what is half already"
    assert {ref.spec.dtype for ref in mlp.list_gradients()} == {"float32"}
    added = [op.outputs[0].spec.shape for op in program.ops if op.name == "aten::add_"]
    assert added == [(5, 20), (5,), (20, 10), (20,)], "casts come back last cast first: the weight before the bias"


def test_leaving_autocast_lets_go_of_casts_that_only_its_cache_holds():
    builder = RankBuilder(BATCH, 0, 1, 1)
    builder.half = "float16"
    mlp = Mlp(builder, "Model.mlp", WIDTHS, input_grad=False)
    mlp.write_forward(builder.add_input_copy((BATCH, WIDTHS[0]), "float32"))

    mlp.leave_autocast()

    program = builder.build_program()
    gone = [ref for layer in mlp.layers for ref in (layer.cast_bias, layer.transposed)]
    frees = [int(program.columns.storage_free[ref.storage]) for ref in gone]
    # both biases and the first weight, which passes no gradient on; the second weight stays for backward
    assert [free == program.num_ops - 1 for free in frees] == [True, True, True, False]


def test_under_ddp_gradients_go_to_the_reducer():
    builder = RankBuilder(BATCH, 0, 4, 4)
    mlp = Mlp(builder, "Model.mlp", WIDTHS, input_grad=False)
    mlp.reducer = Reducer(builder, builder.world, mlp.list_gradient_specs())
    result = mlp.write_forward(builder.add_input_copy((BATCH, WIDTHS[0]), "float32"))
    builder.open_scope("aten::ones_like", Phase.BACKWARD)
    grad = builder.add_tensor(result.shape)
    builder.add_op("aten::ones_like", [("self", result)], [grad])
    mlp.write_backward(grad)
    mlp.reducer.finish_reduction()

    program = builder.build_program()

    (reduced,) = [op for op in program.ops if op.name == "c10d::allreduce_"]
    assert reduced.signature.scalar("bytes") == 4 * (10 * 20 + 20 + 20 * 5 + 5)
    assert not [op for op in program.ops if op.name == "aten::add_"]
    assert len(mlp.list_gradients()) == 4


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_is_a_mean_whose_backward_starts_from_one(kind):
    builder = StepBuilder(BATCH)
    probabilities, target = (builder.add_resident_tensor((BATCH, 1), StorageKind.ACTIVATION) for _ in range(2))
    builder.open_scope("aten::sigmoid", Phase.FORWARD)
    mean, op = write_loss_forward(builder, kind, probabilities, target)
    one = write_backward_start(builder, mean)
    grad = write_loss_backward(builder, kind, one, probabilities, target, forward=op)

    program = builder.build_program()

    assert (mean.shape, one.shape, grad.shape) == ((), (), (BATCH, 1))
    assert program.ops[op].signature.scalar("reduction") == 1
    assert program.ops[-1].forward == op
    phases = [scope.phase for scope in program.scopes]
    assert phases[-3:] == [Phase.LOSS, Phase.BACKWARD, Phase.BACKWARD]
    assert ("aten::broadcast_tensors" in [scope.name for scope in program.scopes]) == (kind == "mse")


def interacted(forward):
    builder = StepBuilder(BATCH)
    builder.open_scope("aten::start", Phase.FORWARD)
    dense, pooled = builder.add_tensor((BATCH, 16)), builder.add_tensor((BATCH, 3, 16))
    builder.add_op("aten::ones", [], [dense, pooled])
    return builder, *forward(builder, dense, pooled)


def test_dot_products_are_the_lower_triangle_after_the_dense_vector():
    builder, done, result = interacted(lambda builder, dense, pooled: write_dot(builder, dense, pooled, keep=True))
    # four vectors: six pairs
    assert result.shape == (BATCH, 16 + 6)

    to_dense, to_pooled = write_dot_backward(builder, done, builder.add_view(result, result.shape))

    assert (to_dense.shape, to_pooled.shape) == ((BATCH, 16), (BATCH, 3, 16))
    program = builder.build_program()
    assert [op.name for op in program.ops].count("aten::bmm") == 3
    put = next(op for op in program.ops if op.name == "aten::_index_put_impl_")
    assert put.signature.scalar("accumulate") is True


def test_without_a_backward_pass_dot_products_keep_nothing():
    builder, done, result = interacted(lambda builder, dense, pooled: write_dot(builder, dense, pooled, keep=False))
    program = builder.build_program()
    assert program.columns.storage_free[done.joined.storage] == program.num_ops - 1
    assert program.columns.storage_free[result.storage] == program.num_ops


def test_concatenation_is_undone_by_views():
    def forward(builder, dense, pooled):
        done = write_concatenation(builder, dense, pooled)
        return done, done.joined

    builder, done, joined = interacted(forward)
    assert joined.shape == (BATCH, 16 + 3 * 16)

    to_dense, to_pooled = write_concatenate_backward(builder, done, builder.add_view(joined, joined.shape))

    assert (to_dense.shape, to_pooled.shape) == ((BATCH, 16), (BATCH, 3, 16))
    assert to_dense.storage == to_pooled.storage == joined.storage
