"""Programs of sharded recommenders: who sends what to whom, what ranks share, and what is rejected."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest

from tests.models.programs.lives import lives
from traincast.hardware import load_platform
from traincast.ir import Program, StorageKind
from traincast.ir.validate import validate_workload
from traincast.models.embeddings import Pooling, Table, Uniform, Zipf, load_tables
from traincast.models.placement import Placement, Plan
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.step import build_sharded_dlrm
from traincast.simulator.prediction.prediction import predict_step
from traincast.utils.errors import TraincastError

BATCH, WORLD, NODE = 64, 4, 2
DENSE = Dense(bottom_mlp=(13, 64, 32), top_mlp=(48, 1))
TABLES = [
    Table(
        name=f"t{i}", rows=1000 * (i + 1), dim=32, pooling=Pooling.from_constant(1 + i % 3),
        optimizer="rowwise_adagrad" if i % 2 else "sgd",
    )
    for i in range(9)
]  # fmt: skip
MIXED = (
    Placement("table_wise", (0,)),
    Placement("table_wise", (1,)),
    Placement.make_row_wise(WORLD),
    Placement("column_wise", (0, 1, 2, 3)),
    Placement("table_row_wise", (2, 3)),
    Placement.make_data_parallel(WORLD),
    Placement("table_wise", (3,), "fused_uvm"),
    Placement("table_wise", (2,), "fused_uvm_caching", 0.1),
    Placement("column_wise", (3, 3)),
)


def plan_of(tables, placements, world=WORLD) -> Plan:
    return Plan(tuple(t.name for t in tables), tuple(placements), world)


def build(dense=DENSE, tables=TABLES, placements=MIXED, **options):
    options = {"batch_size": BATCH, "gpus_per_node": NODE, **options}
    return build_sharded_dlrm(dense, tables, plan_of(tables, placements), **options)


def collectives(program: Program) -> list[dict[str, object]]:
    return [dict(op.signature.scalars) for op in program.ops if op.name.startswith("c10d::")]


def test_lookups_of_a_rank_are_put_in_order_once_however_many_ranks_have_a_copy_of_the_table():
    placements = (Placement("table_wise", (1,)), Placement.make_row_wise(WORLD), Placement.make_data_parallel(WORLD))
    workload = build(None, TABLES[:3], placements)
    order = next(op for op in workload.programs[0].ops if op.name == "fbgemm::permute_2D_sparse_data")
    assert [spec.shape for spec in order.signature.outputs] == [(BATCH * 3,), (BATCH * (1 + 2 + 3),)]


@pytest.mark.parametrize("dense", [DENSE, None], ids=["dense", "tables-only"])
@pytest.mark.parametrize("redistribute", [True, False], ids=["redistributed", "fed"])
def test_every_kind_together_is_a_step_that_all_ranks_agree_on(dense, redistribute):
    workload = build(dense, redistribute_inputs=redistribute)
    validate_workload(workload)

    # the simulation rejects ranks that disagree on order, sizes or partners
    result = predict_step(workload, load_platform("dgx-a100"))

    assert result.iteration > 0 and result.exposed_comm > 0 and result.gpus == WORLD
    assert result.estimated_ops == ()


def test_what_one_rank_sends_another_receives():
    workload = build()
    calls = [collectives(workload.programs[p]) for p in workload.ranks]
    uneven = 0
    for together in zip(*calls, strict=True):
        if together[0]["collective"] != "all_to_all_v" or len(together[0]["group"]) != WORLD:
            continue
        uneven += 1
        for sender, call in enumerate(together):
            for receiver, other in enumerate(together):
                assert call["send_splits"][receiver] == other["recv_splits"][sender]
    assert uneven >= 6


def test_messages_are_those_of_the_sharding():
    tables = [replace(table, optimizer="sgd") for table in TABLES[:3]]
    placements = (Placement("table_wise", (1,)), Placement.make_row_wise(WORLD), Placement("table_row_wise", (0, 1)))
    workload = build(None, tables, placements)
    whole = 4 * BATCH * WORLD * 32  # pooled fp32 rows of all samples
    for rank in range(WORLD):
        calls = collectives(workload.programs[workload.ranks[rank]])
        reduced = [call for call in calls if call["collective"] == "reduce_scatter"]
        gathered = [call for call in calls if call["collective"] == "all_gather"]
        node = (0, 1) if rank < 2 else (2, 3)
        assert (0, 1, 2, 3) in [call["group"] for call in reduced]
        assert node in [call["group"] for call in reduced]
        across = [call for call in calls if call["group"] == (rank % 2, rank % 2 + 2)]
        assert [call["collective"] for call in across] == ["all_to_all_v"] * 2
        world = [call for call in reduced if len(call["group"]) == WORLD]
        assert [call["bytes"] for call in world] == [whole]
        assert [call["bytes"] for call in gathered if len(call["group"]) == WORLD] == [whole]


def test_data_parallel_tables_are_reduced_whole_and_stepped():
    workload = build(None, TABLES[:1], (Placement.make_data_parallel(WORLD),))
    (call,) = collectives(workload.programs[0])
    assert (call["collective"], call["bytes"]) == ("all_reduce", 4 * 1000 * 32)
    assert workload.ranks == (0, 0, 0, 0)
    assert any(op.name == "aten::_foreach_add_" for op in workload.programs[0].ops)

    half = build(None, [replace(TABLES[0], dtype="fp16")], (Placement.make_data_parallel(WORLD),))
    assert [call["bytes"] for call in collectives(half.programs[0])] == [2 * 1000 * 32]

    adam = build(None, [replace(TABLES[0], optimizer="adam")], (Placement.make_data_parallel(WORLD),))
    assert any(op.name == "aten::_foreach_addcdiv_" for op in adam.programs[0].ops)


def test_copied_tables_are_dense_parameters_whose_gradients_are_views_of_their_bucket():
    """As TorchRec 1.8 has them: DDP with `gradient_as_bucket_view`, no fused optimizer, whatever the table's own."""
    table = replace(TABLES[0], optimizer="rowwise_adagrad")
    (program,) = build(DENSE, [table], (Placement.make_data_parallel(WORLD),)).programs
    elements = table.rows * table.dim
    whole = [op for op in program.ops if any(spec.numel == elements for spec in op.signature.inputs)]
    assert [op.name for op in whole if op.name not in ("aten::detach", "aten::as_strided")] == [
        "fbgemm::dense_embedding_codegen_forward_unweighted_cuda",
        "fbgemm::split_embedding_backward_codegen_dense_unweighted_exact_cuda",
        "aten::mul",
        "c10d::allreduce_",
        "aten::_foreach_addcmul_",
        "aten::_foreach_sqrt",
        "aten::_foreach_add_",
        "aten::_foreach_mul",
        "aten::_foreach_addcdiv_",
    ]
    # weights, bucket and a moment for every element stay; the gradient itself goes once it is in the bucket
    lasting = [life for life in lives(program, range(program.num_ops)) if life.nbytes == 4 * elements]
    assert sorted(life.kind.name for life in lasting if life.alloc < 0) == ["BUFFER", "OPTIMIZER_STATE", "PARAMETER"]
    (gradient,) = [life for life in lasting if life.alloc == whole[1].index]
    assert gradient.free == next(op.index for op in whole if op.name == "aten::mul") + 1


def test_state_of_copied_tables_has_their_type():
    table = replace(TABLES[0], dtype="fp16", optimizer="adam")
    (program,) = build(None, [table], (Placement.make_data_parallel(WORLD),)).programs
    states = [life for life in lives(program, range(program.num_ops)) if life.kind == StorageKind.OPTIMIZER_STATE]
    assert [life.nbytes for life in states] == [2 * table.rows * table.dim] * 2


@pytest.mark.parametrize(("optimizer", "items"), [("rowwise_adagrad", 1), ("adagrad", 0), ("sgd", 0)])
def test_only_row_wise_state_of_tables_in_host_memory_is_on_the_device(optimizer, items):
    table = replace(TABLES[0], optimizer=optimizer)
    program = build(None, [table], (Placement("table_wise", (0,), "fused_uvm"),)).programs[0]
    states = [life for life in lives(program, range(program.num_ops)) if life.kind == StorageKind.OPTIMIZER_STATE]
    assert sum(life.nbytes for life in states) == 4 * table.rows * items


def test_equal_ranks_share_a_program_and_others_a_template():
    tables = [replace(TABLES[0], name=f"t{i}", rows=1000 + 500 * (i == 3)) for i in range(4)]
    workload = build(None, tables, [Placement("table_wise", (i,)) for i in range(4)])
    assert workload.ranks == (0, 0, 0, 1)
    first, second = workload.programs
    assert first.columns is second.columns and first.symbolic is second.symbolic and first.names is second.names
    assert first.sizes is not second.sizes


def test_a_rank_without_tables_takes_part():
    workload = build(DENSE, TABLES[:2], [Placement("table_wise", (0,)), Placement("table_wise", (1,))])
    idle = workload.programs[workload.ranks[3]]
    assert not any("split_embedding" in op.name for op in idle.ops)
    assert [c["collective"] for c in collectives(idle)] == [c["collective"] for c in collectives(workload.programs[0])]


def test_a_table_of_fewer_rows_than_ranks_is_still_reduced_by_all():
    tiny = [replace(TABLES[0], rows=3, optimizer="rowwise_adagrad")]
    workload = build(None, tiny, [Placement.make_row_wise(WORLD)])
    assert predict_step(workload, load_platform("dgx-a100")).iteration > 0


def test_tables_in_host_memory_are_slower_and_a_cache_helps():
    table = Table(
        name="t", rows=5_000_000, dim=64, pooling=Pooling.from_constant(20), access=Zipf(1.1), optimizer="sgd"
    )

    def seconds(kernel: str, fraction: float = 0.0) -> float:
        placements = [Placement("table_wise", (0,), kernel, fraction)]
        workload = build(None, [table], placements, batch_size=4096)
        return predict_step(workload, load_platform("dgx-a100")).iteration

    on_device, in_host = seconds("fused"), seconds("fused_uvm")
    small, large = seconds("fused_uvm_caching", 0.02), seconds("fused_uvm_caching", 0.5)
    assert on_device < large < small < in_host
    assert in_host > 1.5 * on_device


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_optimizers_types_and_weights_all_have_kernels(optimizer, dtype):
    tables = [
        replace(t, optimizer=optimizer, dtype=dtype, weighted=True, dim=16 * (1 + i)) for i, t in enumerate(TABLES)
    ]
    workload = build(None, tables, [Placement("table_wise", (i % WORLD,)) for i in range(len(tables))])
    result = predict_step(workload, load_platform("dgx-a100"))
    assert result.estimated_ops == ()
    sent = [c for c in collectives(workload.programs[0]) if c["collective"].startswith("all_to_all")]
    assert len(sent) == 1 + 3 + 2  # sizes; lengths, row numbers and weights; embeddings and gradients


def test_hot_rows_make_lookups_faster():
    def seconds(access) -> float:
        tables = [
            Table(
                name=f"t{i}",
                rows=10_000_000,
                dim=128,
                pooling=Pooling.from_constant(20),
                access=access,
                optimizer="sgd",
            )
            for i in range(4)
        ]
        workload = build(None, tables, [Placement("table_wise", (i,)) for i in range(4)], batch_size=8192)
        return predict_step(workload, load_platform("dgx-a100")).by_family["embedding"]

    assert seconds(Zipf(1.2)) < 0.6 * seconds(Uniform())


def test_many_ranks_and_tables_are_written_fast():
    tables, world = load_tables("mlperf-dlrm-v2") * 8, 64
    tables = [replace(table, name=f"t{i}") for i, table in enumerate(tables)]
    plan = plan_of(tables, [Placement("table_wise", (i % world,)) for i in range(len(tables))], world)
    build_sharded_dlrm(
        None, tables[:64], plan_of(tables[:64], plan.placements[:64], world), batch_size=256
    )  # tables' loads
    start = time.process_time()
    workload = build_sharded_dlrm(None, tables, plan, batch_size=256)
    assert time.process_time() - start < 10
    assert len({id(program.columns) for program in workload.programs}) == 1


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(TraincastError, match="table 't0' has dim 16; the dot interaction needs the bottom MLP's 32"):
        build(DENSE, [replace(TABLES[0], dim=16)], [Placement("table_wise", (0,))])
    with pytest.raises(TraincastError, match="table 't0' has optimizer 'none'"):
        build(None, [replace(TABLES[0], optimizer="none")], [Placement("table_wise", (0,))])
    with pytest.raises(TraincastError, match="4 ranks do not fill nodes of 3 GPUs"):
        build(None, TABLES[:1], [Placement("table_wise", (0,))], gpus_per_node=3)
    with pytest.raises(TraincastError, match="does not place table 't1'"):
        build_sharded_dlrm(None, TABLES[:2], plan_of(TABLES[:1], [Placement("table_wise", (0,))]), batch_size=8)
    with pytest.raises(TraincastError, match="build it anew"):
        build().resized(batch_size=7)
    with pytest.raises(TraincastError, match="interaction 'product'"):
        Dense(bottom_mlp=(1, 2), top_mlp=(1,), interaction="product")


def _random_case(seed: int) -> tuple[list[Table], list[Placement]]:
    draw = Random(seed)
    world, tables, placements = 8, [], []
    for i in range(draw.randint(1, 14)):
        table = Table(
            name=f"t{i}", rows=draw.choice((3, 50, 10_000, 5_000_000)), dim=draw.choice((8, 32, 96)),
            pooling=Pooling.from_constant(draw.choice((0.3, 1, 20))), access=draw.choice((Uniform(), Zipf(1.05))),
            dtype=draw.choice(("fp32", "fp16")), weighted=draw.random() < 0.3,
            optimizer=draw.choice(("sgd", "adagrad", "rowwise_adagrad", "adam")),
        )  # fmt: skip
        node = draw.randrange(2)
        kernel, cached = draw.choice((("fused", 0.0), ("fused", 0.0), ("fused_uvm", 0.0), ("fused_uvm_caching", 0.2)))
        placement = draw.choice(
            (
                Placement("table_wise", (draw.randrange(world),), kernel, cached),
                Placement("row_wise", tuple(range(world)), kernel, cached),
                Placement("column_wise", (draw.randrange(world), draw.randrange(world)), kernel, cached),
                Placement("table_row_wise", tuple(range(4 * node, 4 * node + 4)), kernel, cached),
                Placement.make_data_parallel(world),
            )
        )
        tables.append(table)
        placements.append(placement)
    return tables, placements


@pytest.mark.parametrize("seed", range(12))
def test_any_plan_is_a_step_that_can_be_walked(seed):
    tables, placements = _random_case(seed)
    dense = replace(DENSE, interaction="cat", optimizer=("sgd", "adagrad", "adam")[seed % 3])
    workload = build_sharded_dlrm(
        (dense, None)[seed % 2], tables, plan_of(tables, placements, 8), batch_size=32, gpus_per_node=4,
        redistribute_inputs=seed % 4 < 2,
    )  # fmt: skip
    validate_workload(workload)
    node = load_platform("dgx-a100")
    result = predict_step(workload, replace(node, topology=replace(node.topology, gpus_per_node=4), gpus_per_node=4))
    assert result.iteration > 0 and result.estimated_ops == ()
