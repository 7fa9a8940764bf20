"""HugeCTR's steps: its planner, its hybrid embedding, and what a step exchanges."""

from __future__ import annotations

import pytest

from traincast.ir.validate import validate_workload
from traincast.models.dlrm.config import CRITEO_ROWS, DLRM_V2
from traincast.models.embeddings import Pooling, Table, Uniform, Zipf
from traincast_evaluation.published.catalog import published_programs
from traincast_evaluation.published.hugectr_hybrid import compute_frequent_count, count_hybrid_rows
from traincast_evaluation.published.hugectr_plan import compute_capacity_bytes, count_adagrad_bytes, plan_tables
from traincast_evaluation.published.run import Run

PROGRAMS = published_programs()
ROWS, HOTNESS = (40_000_000, 1000, 40_000_000, 40_000_000), (100, 1, 27, 12)


def planned(buckets, *, table_cost=1.75, copied_below=8e6, capacity=60e9, lookups=HOTNESS):
    return plan_tables(
        lookups,
        count_adagrad_bytes(ROWS, 128),
        buckets,
        table_cost=table_cost,
        copied_below=copied_below,
        capacity=capacity,
    )


def test_small_tables_are_copied_and_busy_ones_split():
    sizes = count_adagrad_bytes(DLRM_V2.rows_per_table, 128)
    plan = plan_tables(DLRM_V2.lookups_per_table, sizes, 8, table_cost=1.75, copied_below=8e6, capacity=60e9)
    assert plan.copied == (3, 5, 6, 7, 8, 12, 13, 15, 16, 17, 18, 24, 25)
    # of 214 lookups 100 are in one table, which four GPUs share; a GPU of its own has the table with 27
    assert (plan.splits[20], plan.splits[21], plan.splits[0]) == (4, 1, 1)
    assert sorted(len(bucket) for bucket in plan.buckets) == [1, 1, 1, 1, 1, 3, 4, 4]


def test_a_table_is_not_split_where_sending_it_costs_more():
    assert planned(2, table_cost=1000.0, capacity=200e9).splits == (1, 0, 1, 1)


def test_few_tables_are_best_split_over_all():
    assert planned(8).splits == (8, 0, 8, 8)


def test_tables_that_fit_nowhere_are_split_until_they_do():
    # 41 GB each: one GPU of 30 GB holds no whole one
    plan = planned(4, capacity=31e9)
    assert all(count >= 2 for table, count in enumerate(plan.splits) if table != 1)
    assert (
        max(sum(count_adagrad_bytes(ROWS, 128)[t] / plan.splits[t] for t in bucket) for bucket in plan.buckets) <= 31e9
    )


def test_a_bucket_never_has_two_parts_of_a_table():
    assert all(len(set(bucket)) == len(bucket) for bucket in planned(8).buckets)


def test_a_node_has_the_room_of_its_gpus():
    assert compute_capacity_bytes(8) == 8 * compute_capacity_bytes(1)


def run(gpus, batch=55296, gpus_per_node=8):
    return Run(gpus=gpus, global_batch=batch, dtype="fp16", gpus_per_node=gpus_per_node)


def test_rows_are_frequent_by_hugectrs_own_rule():
    # 55296 * sqrt(0.06 / (6912 * 6911)); on 14 nodes 14 * 23.75 / 130 / 2 * 14 / 13
    assert compute_frequent_count(run(8)) == pytest.approx(1.9597, rel=1e-4)
    assert compute_frequent_count(run(112, 71680)) == pytest.approx(1.3772, rel=1e-4)
    # on 8 nodes with efficiency 1: 8 * 23.75 / 130 * 8 / 7; in MLPerf 1.0 with the library's bandwidths, 190 for 23.75
    assert compute_frequent_count(run(64, 71680)) == pytest.approx(1.6703, rel=1e-4)
    assert compute_frequent_count(run(64, 71680), by_default=True) == pytest.approx(13.3626, rel=1e-4)


def test_every_row_of_a_small_table_is_frequent_and_none_of_a_vast_one():
    small, vast = (
        Table(name="t", rows=rows, dim=128, pooling=Pooling.from_constant(1), access=Uniform()) for rows in (10, 10**9)
    )
    rows = count_hybrid_rows([small], run(8))
    assert (rows.frequent, rows.touched, rows.infrequent_share) == (10, 10, pytest.approx(0.0))
    rows = count_hybrid_rows([vast], run(8))
    assert (rows.frequent, rows.touched, rows.infrequent_share) == (0, 0, 1.0)


def test_more_skew_leaves_less_to_exchange():
    def share(exponent):
        table = Table(name="t", rows=10**6, dim=128, pooling=Pooling.from_constant(1), access=Zipf(exponent))
        return count_hybrid_rows([table], run(8)).infrequent_share

    assert share(1.2) < share(1.05) < share(0.8)


def collectives(program):
    return [kind for op in program.ops if (kind := op.signature.scalar("collective"))]


def test_the_hybrid_embedding_exchanges_rows_on_one_node_and_sums_them_between_nodes():
    one = PROGRAMS["hugectr-dlrm"].step(gpus=8)
    assert one.ranks == (0,) * 8
    assert collectives(one.programs[0]) == ["all_to_all"] * 4 + ["all_reduce"]
    many = PROGRAMS["hugectr-dlrm"].step(gpus=16, global_batch=16 * 640)
    validate_workload(many)
    assert many.ranks == (0,) * 16
    kinds = ["node_first_all_to_all", "node_first_all_to_all", "one_shot_all_reduce"]
    assert collectives(many.programs[0]) == kinds


def sent(program, kind):
    return [op.signature.scalar("bytes") for op in program.ops if op.signature.scalar("collective") == kind]


def test_between_nodes_infrequent_rows_are_sent_and_frequent_ones_summed_with_the_dense_gradients():
    (program,) = PROGRAMS["hugectr-dlrm"].step(gpus=112, global_batch=71680).programs
    tables = [
        Table(name="t", rows=rows, dim=128, pooling=Pooling.from_constant(1), access=Zipf(1.05)) for rows in CRITEO_ROWS
    ]
    rows = count_hybrid_rows(tables, run(112, 71680))
    infrequent = round(640 * 26 * rows.infrequent_share)
    assert sent(program, "node_first_all_to_all") == [infrequent * 128 * 2] * 2
    dense = 2_371_457  # parameters of both MLPs
    assert sent(program, "one_shot_all_reduce") == [(dense + rows.frequent * 128) * 2]


def order_of(name, gpus=16):
    (program,) = PROGRAMS[name].step(gpus=gpus, global_batch=gpus * 640).programs
    return [op.signature.name for op in program.ops]


def test_at_first_rows_were_found_in_the_step_and_sent_after_the_sums():
    early, later = order_of("hugectr-dlrm-2021"), order_of("hugectr-dlrm")
    assert early.count("hugectr::hybrid_indices") == 1
    assert later.count("hugectr::hybrid_indices") == 0
    exchange, total = "hugectr::node_first_all_to_all", "hugectr::one_shot_all_reduce"
    assert [name for name in early if name in (exchange, total)] == [exchange, total, exchange]
    assert [name for name in later if name in (exchange, total)] == [exchange, exchange, total]
    assert order_of("hugectr-dlrm-2021", 8).count("hugectr::hybrid_indices") == 1


def test_without_the_hybrid_embedding_nccl_exchanges_between_nodes_too():
    (program,) = PROGRAMS["hugectr-dlrm-2020"].step(gpus=16, global_batch=16 * 640).programs
    assert collectives(program) == ["all_to_all", "all_to_all", "all_reduce"]


def test_without_the_hybrid_embedding_every_row_is_exchanged():
    (program,) = PROGRAMS["hugectr-dlrm-2020"].step(gpus=8).programs
    assert sent(program, "all_to_all") == [6912 * 26 * 128 * 2] * 2


def test_dcnv2_on_one_node_exchanges_what_every_gpu_pooled():
    workload = PROGRAMS["hugectr-dlrm-dcnv2"].step(gpus=8)
    validate_workload(workload)
    kinds = [collectives(program) for program in workload.programs]
    # keys of the next batch, pooled rows, their gradients, dense gradients
    assert all([kind.removesuffix("_v") for kind in row] == ["all_to_all"] * 3 + ["all_reduce"] for row in kinds)
    pooled = sum(sent(workload.programs[rank], "all_to_all_v")[0] for rank in workload.ranks)
    # thirteen tables, one of them in four parts: 16 results for every sample
    assert pooled == 55296 * 16 * 128 * 2


def test_dcnv2_on_nodes_sums_inside_of_a_node_first():
    workload = PROGRAMS["hugectr-dlrm-dcnv2"].step(gpus=16, global_batch=16 * 512)
    validate_workload(workload)
    kinds = [kind.removesuffix("_v") for kind in collectives(workload.programs[0])]
    assert kinds == ["all_to_all", "reduce_scatter", "all_to_all", "all_to_all", "all_gather", "all_reduce"]
    assert len(set(workload.ranks)) == 16


def test_a_step_is_one_graph():
    for name in ("hugectr-dlrm", "hugectr-dlrm-dcnv2"):
        (program, *_) = PROGRAMS[name].step(gpus=8).programs
        scopes = [program.names[number] for number in program.columns.scope_name]
        assert scopes[0].startswith("cuda_graph_launch::")
        assert all(scope.startswith("cuda_graph::") for scope in scopes[1:])
