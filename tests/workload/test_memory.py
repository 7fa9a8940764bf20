"""Peak memory by what it is for: tables and messages apart from the rest."""

from __future__ import annotations

import pytest

from traincast.embeddings import Pooling, Table
from traincast.models.catalog import load_model
from traincast.parallel.sharded_dlrm import sharded_dlrm
from traincast.sharding.memory import MemoryLimits, memory_need
from traincast.sharding.plan import Placement, Plan
from traincast.workload import peak_memory

TABLES = tuple(
    Table(name=f"t{i}", rows=1_000_000 * (i + 1), dim=64, pooling=Pooling.constant(10.0), optimizer="rowwise_adagrad")
    for i in range(4)
)


def test_tables_are_not_counted_with_the_other_parameters():
    memory = peak_memory(load_model("dlrm-default").programs[0])

    assert memory.by_kind["embedding_table"] == 8 * 1_000_000 * 64 * 4
    assert 0 < memory.by_kind["parameter"] < 1e-2 * memory.by_kind["embedding_table"]


def test_a_model_without_lookups_or_collectives_has_neither():
    memory = peak_memory(load_model("resnet50").programs[0])

    assert not {"embedding_table", "communication"} & set(memory.by_kind)


def test_the_kinds_add_up_to_the_peak():
    for name in ("dlrm-mlperf", "bert-large", "resnet50"):
        memory = peak_memory(load_model(name).programs[0])
        assert sum(memory.by_kind.values()) == memory.peak_bytes


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_a_sharded_step_needs_what_its_plan_says(rank):
    placements = (Placement("table_wise", (0,)), Placement("table_wise", (1,)), Placement.row_wise(4))
    plan = Plan(tuple(t.name for t in TABLES), (*placements, Placement("column_wise", (2, 3))), 4)
    step = sharded_dlrm(None, TABLES, plan, batch_size=512, gpus_per_node=4)
    need = memory_need(plan, TABLES, MemoryLimits(device=40e9), batch_size=512)

    memory = peak_memory(step.programs[step.ranks[rank]])

    weights, state = need.bytes[rank, 0], need.bytes[rank, 1]
    assert memory.by_kind["embedding_table"] == pytest.approx(weights, rel=1e-5)
    assert memory.by_kind["optimizer_state"] == pytest.approx(state, rel=1e-3)
    assert memory.by_kind["communication"] > 0
    assert memory.peak_bytes == pytest.approx(need.device[rank], rel=0.05)
