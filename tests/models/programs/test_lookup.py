"""FBGEMM's table-batched lookup: widened indices, checks, caches, fused updates."""

from __future__ import annotations

import pytest

from traincast.ir import Phase, StorageKind
from traincast.models.embeddings import Pooling, Table
from traincast.models.layers.builder import RankBuilder, StepBuilder
from traincast.models.layers.optimizers import TableBatchedLookup
from traincast.models.placement import Placement, Plan
from traincast.models.recommenders.storage import DEVICE
from traincast.models.sharded_dlrm.collection import KernelLookup
from traincast.models.sharded_dlrm.layout import assign_shards_to_ranks

SAMPLES = 16


def kernel(builder, optimizer="sgd", *, weighted=False, states=0):
    return TableBatchedLookup(
        builder=builder,
        tables=2,
        weights=builder.add_resident_tensor((640,), StorageKind.PARAMETER),
        states=[builder.add_resident_tensor((640,), StorageKind.OPTIMIZER_STATE) for _ in range(states)],
        forms=[("total_D", 64), ("max_D", 32)],
        optimizer=optimizer,
        weighted=weighted,
    )


def run(optimizer="sgd", *, dtype="int64", weighted=False, states=0):
    builder = StepBuilder(SAMPLES)
    lookup = kernel(builder, optimizer, weighted=weighted, states=states)
    builder.open_scope("aten::start", Phase.FORWARD)
    indices, offsets = builder.add_tensor((100,), dtype), builder.add_tensor((2 * SAMPLES + 1,), dtype)
    builder.add_op("aten::ones", [], [indices, offsets])
    weights = builder.add_resident_tensor((100,), StorageKind.INPUT) if weighted else None
    used = lookup.write_bounds_check(indices, offsets, weights)
    pooled = lookup.write_forward(SAMPLES, 64)
    builder.open_scope("aten::ones_like", Phase.BACKWARD)
    result = lookup.write_backward(builder.add_view(pooled, pooled.shape))
    return builder.build_program(), used, (indices, offsets), result


def named(program, part):
    return [op for op in program.ops if part in op.name]


def test_lookup_and_update_are_one_kernel_each():
    program, _, _, result = run("adagrad", states=1)

    forward, backward = named(program, "codegen_forward"), named(program, "backward_codegen")

    assert [op.name for op in forward] == ["fbgemm::split_embedding_codegen_forward_unweighted_cuda"]
    assert [op.name for op in backward] == ["fbgemm::split_embedding_backward_codegen_adagrad_unweighted_exact_cuda"]
    assert forward[0].outputs[0].spec.shape == (SAMPLES, 64)
    assert backward[0].forward == forward[0].index
    assert result is None, "updated in place"
    assert backward[0].signature.scalar("learning_rate") == 0.01


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("adagrad", 1), ("adam", 2)])
def test_the_update_is_given_every_moment(optimizer, states):
    program, *_ = run(optimizer, states=states)
    (update,) = named(program, "backward_codegen")
    moments = [name for name, _ in update.signature.groups if name.startswith("momentum")]
    assert moments == [f"momentum{number + 1}_dev" for number in range(states)]


def test_dense_tables_give_their_gradient():
    program, _, _, result = run("dense")
    assert result.shape == (640,)
    assert named(program, "dense_embedding_codegen_forward_unweighted_cuda")


def test_weighted_lookups_are_given_their_weights():
    program, *_ = run(weighted=True)
    (forward,) = named(program, "codegen_forward_weighted")
    assert forward.signature.groups[-1] == ("indice_weights", 1)
    assert named(program, "backward_codegen_sgd_weighted_exact")


def test_narrow_indices_are_widened_and_let_go():
    program, used, given, _ = run(dtype="int32")

    assert {ref.spec.dtype for ref in used} == {"int64"}
    casts = named(program, "_to_copy")
    assert len(casts) == 2
    frees = [int(program.columns.storage_free[ref.storage]) for ref in given]
    assert frees == [op.index for op in casts]


def test_wide_indices_are_used_as_they_are():
    program, used, given, _ = run()
    assert used == given
    assert named(program, "_to_copy") == []
    assert [scope.name for scope in program.scopes].count("aten::to") == 2, "the host calls it all the same"


def test_bounds_are_checked_before_the_lookup():
    program, *_ = run()
    (check,) = named(program, "bounds_check")
    (forward,) = named(program, "codegen_forward")
    assert check.index < forward.index
    assert check.inputs[0].spec.shape == (2,)


def test_indices_go_with_the_update():
    program, used, _, _ = run()
    (update,) = named(program, "backward_codegen")
    assert {int(program.columns.storage_free[ref.storage]) for ref in used} == {update.index}


def rank_lookup(placement, **fields):
    table = Table(name="t", rows=1000, dim=32, pooling=Pooling.from_constant(3), **fields)
    layout = assign_shards_to_ranks([table], Plan(("t",), (placement,), 1), batch_size=SAMPLES, gpus_per_node=1)
    (batch,) = layout.sections[0].ranks[0]
    builder = RankBuilder(SAMPLES, 0, 1, 1)
    lookup = KernelLookup.from_batch(builder, batch, SAMPLES, DEVICE)
    builder.open_scope("aten::start", Phase.FORWARD)
    indices, offsets = (builder.add_resident_tensor((size,), StorageKind.INPUT, "int64") for size in (48, 17))
    lookup.write_forward(indices, offsets, None)
    return builder.build_program(), lookup


@pytest.mark.parametrize(
    ("kernel", "cached", "device"),
    [("fused", 1.0, "cuda"), ("fused_uvm", 1.0, "cpu:pinned"), ("fused_uvm_caching", 0.1, "cpu:pinned")],
)
def test_weights_are_where_the_plan_says(kernel, cached, device):
    placement = Placement("table_wise", (0,), kernel, cached) if kernel == "fused_uvm_caching" else Placement(
        "table_wise", (0,), kernel
    )  # fmt: skip
    program, lookup = rank_lookup(placement)
    assert lookup.weights.spec.device == device
    (forward,) = named(program, "codegen_forward")
    assert (forward.signature.scalar("host") is None) == (device == "cuda")


def test_a_cache_is_filled_before_the_lookup():
    program, lookup = rank_lookup(Placement("table_wise", (0,), "fused_uvm_caching", 0.1))

    names = [op.name for op in program.ops]

    assert lookup.cache.shape == (100 * 32,)
    assert names == [
        "fbgemm::bounds_check_indices",
        "fbgemm::linearize_cache_indices",
        "fbgemm::lru_cache_populate",
        "fbgemm::lxu_cache_lookup",
        "fbgemm::split_embedding_codegen_forward_unweighted_cuda",
    ]
    populate = program.ops[2].signature
    row = 32 * 4
    assert populate.scalar("fetched_bytes") == pytest.approx(populate.scalar("fetched_rows") * row, abs=row)


@pytest.mark.parametrize(
    ("optimizer", "kernel", "shape", "device"),
    [
        ("adagrad", "fused", (32_000,), "cuda"),
        ("adagrad", "fused_uvm", (32_000,), "cpu:pinned"),
        ("rowwise_adagrad", "fused_uvm", (1000,), "cuda"),
    ],
)
def test_states_are_beside_the_weights_but_for_small_ones(optimizer, kernel, shape, device):
    _, lookup = rank_lookup(Placement("table_wise", (0,), kernel), optimizer=optimizer)
    (state,) = lookup.kernel.states
    assert (state.shape, state.spec.device) == (shape, device)


def test_half_precision_tables_are_half_as_large():
    _, lookup = rank_lookup(Placement("table_wise", (0,)), dtype="fp16")
    assert lookup.weights.spec.dtype == "float16"
