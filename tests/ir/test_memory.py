"""Peak memory by what it is for: tables and messages apart from the rest."""

from __future__ import annotations

import pytest

from traincast.hardware import load_platform
from traincast.ir import compute_peak_memory
from traincast.ir.rows import count_bytes_left_out
from traincast.models.catalog import load_model
from traincast.models.data_parallel import apply_data_parallel
from traincast.models.dlrm.config import CRITEO_ROWS
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement.plan import Placement, Plan
from traincast.models.sharded_dlrm.step import build_sharded_dlrm
from traincast.simulator.prediction.prediction import predict_step

TABLES = tuple(
    Table(
        name=f"t{i}", rows=1_000_000 * (i + 1), dim=64, pooling=Pooling.from_constant(10.0), optimizer="rowwise_adagrad"
    )
    for i in range(4)
)


def test_tables_are_not_counted_with_the_other_parameters():
    memory = compute_peak_memory(load_model("dlrm-default").programs[0])

    assert memory.by_kind["embedding_table"] == 8 * 1_000_000 * 64 * 4
    assert 0 < memory.by_kind["parameter"] < 1e-2 * memory.by_kind["embedding_table"]


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("adagrad", 1), ("adam", 2)])
def test_moments_of_fused_tables_are_optimizer_state(optimizer, moments):
    memory = compute_peak_memory(load_model("dlrm-v2", optimizer=optimizer).programs[0])

    parameters = memory.by_kind["embedding_table"] + memory.by_kind["parameter"]
    assert memory.by_kind.get("optimizer_state", 0) == pytest.approx(moments * parameters, rel=1e-3)
    assert memory.by_kind["buffer"] < 1e5


def test_a_model_without_lookups_or_collectives_has_neither():
    memory = compute_peak_memory(load_model("resnet50").programs[0])

    assert not {"embedding_table", "communication"} & set(memory.by_kind)


def test_the_kinds_add_up_to_the_peak():
    for name in ("dlrm-mlperf", "bert-large", "resnet50"):
        memory = compute_peak_memory(load_model(name).programs[0])
        assert sum(memory.by_kind.values()) == memory.peak_bytes


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_a_sharded_step_needs_what_its_plan_says(rank):
    placements = (Placement("table_wise", (0,)), Placement("table_wise", (1,)), Placement.make_row_wise(4))
    plan = Plan(tuple(t.name for t in TABLES), (*placements, Placement("column_wise", (2, 3))), 4)
    step = build_sharded_dlrm(None, TABLES, plan, batch_size=512, gpus_per_node=4)
    shares = [(1.0, 0, 0.25, 0.0), (0.0, 1.0, 0.25, 0.0), (0.0, 0.0, 0.25, 0.5), (0.0, 0.0, 0.25, 0.5)][rank]
    weights = sum(share * table.rows * 64 * 4 for share, table in zip(shares, TABLES, strict=True))
    state = sum(-(-share // 1) * table.rows * 4 if number == 3 else share * table.rows * 4
                for number, (share, table) in enumerate(zip(shares, TABLES, strict=True)))  # fmt: skip

    memory = compute_peak_memory(step.programs[step.ranks[rank]])

    assert memory.by_kind["embedding_table"] == pytest.approx(weights, rel=1e-5)
    assert memory.by_kind["optimizer_state"] == pytest.approx(state, rel=1e-3)
    assert memory.by_kind["communication"] > 0
    assert memory.peak_bytes == pytest.approx(weights + state, rel=0.05)


def test_buckets_of_gradients_are_communication():
    alone = load_model("resnet50")
    memory, many = (
        compute_peak_memory(alone.programs[0]),
        compute_peak_memory(apply_data_parallel(alone, 8).programs[0]),
    )

    gradients = 4 * 25_557_032
    assert memory.by_kind["gradient"] == pytest.approx(gradients, rel=1e-3)
    assert many.by_kind["gradient"] == memory.by_kind["gradient"]
    assert many.by_kind["communication"] == pytest.approx(gradients, rel=1e-3)
    assert many.peak_bytes - memory.peak_bytes == many.by_kind["communication"]


@pytest.mark.parametrize("embedding", ["batched", "fbgemm"])
def test_rows_that_are_not_held_are_told(embedding):
    # Given 187.8 M rows of 128 fp32, of which each table holds two million at most
    step = load_model("dlrm-mlperf", embedding=embedding)
    held = compute_peak_memory(step.programs[0]).by_kind["embedding_table"]
    assert held + count_bytes_left_out(step.programs[0]) == pytest.approx(4 * 128 * sum(CRITEO_ROWS), rel=1e-6)
    assert count_bytes_left_out(load_model("dlrm-default", embedding=embedding).programs[0]) == 0

    # When it is predicted on one GPU, then the result says what all rows would take
    (said,) = predict_step(step, load_platform("a100-80gb")).warnings
    assert "89.4 GB of its embedding tables are not counted" in said
    assert "the step needs at least 96.3 GB, 16.3 GB more than a100-80gb has" in said
