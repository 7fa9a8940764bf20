"""The dense part of a sharded DLRM-DCNv2 is that of the built-in model, which was captured on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import traincast
from tests.models.programs.lives import lives
from traincast.hardware import load_platform
from traincast.ir import Op, Phase, Program, Workload
from traincast.ir.validate import validate_workload
from traincast.models.dlrm.config import DLRM_V2
from traincast.models.placement import Placement, Plan
from traincast.models.sharded_dlrm.dense import DcnDense, Dense
from traincast.models.sharded_dlrm.step import build_sharded_dlrm, make_dlrm_tables
from traincast.simulator.scenario.dlrm_file import load_described_dlrm
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import build_hybrid_variant
from traincast.utils.errors import TraincastError

BATCH = 512
# what only one of them has: copied inputs, DDP, collectives and their layout
_OUTSIDE = ("aten::as_strided", "aten::copy_", "aten::clone", "aten::_unsafe_view", "aten::new_empty")
_EXCHANGES = ("All2All", "ReduceScatter", "KJT", "aten::split_with_sizes", "SplitWithSizes", "aten::reshape")


def _is_dense(op: Op, program: Program) -> bool:
    scope = program.scopes[op.scope].name
    reduced = op.name == "aten::mul" and op.signature.overload == "out"
    copied = op.name == "aten::_to_copy" and scope == "aten::to"
    exchanged = scope.startswith(_EXCHANGES) or (op.name == "aten::view" and op.module in ("Dlrm", "DlrmDcn"))
    return not (
        op.stream or reduced or copied or exchanged or op.name in _OUTSIDE or op.name.startswith(("fbgemm::", "cuda::"))
        or op.module.endswith(".tables")
    )  # fmt: skip


def _dense(program: Program) -> Iterator[tuple[int, Op]]:
    return ((index, op) for index, op in enumerate(program.ops) if _is_dense(op, program))


def _steps(program: Program) -> list[tuple[object, ...]]:
    """Every op of the dense part, with all shapes, and its host op: what its kernels are made from."""
    return [(op.signature, program.scopes[op.scope].name, op.phase, op.thread) for _, op in _dense(program)]


def _sharded(optimizer: str, ranks: int, dtype: str = "fp32") -> Workload:
    platform = load_platform("dgx-h100")
    return build_hybrid_variant(DLRM_V2, ranks, platform, Scenario(batch_size=BATCH, optimizer=optimizer, dtype=dtype))[
        0
    ]


@pytest.mark.parametrize(
    ("optimizer", "ranks", "dtype"),
    [("adagrad", 1, "fp32"), ("adagrad", 4, "fp32"), ("adam", 4, "fp32"), ("sgd", 4, "fp32"),
     ("sgd", 1, "bf16"), ("adagrad", 4, "bf16"), ("sgd", 4, "fp16")],
)  # fmt: skip
def test_the_dense_part_is_that_of_the_captured_model(optimizer: str, ranks: int, dtype: str) -> None:
    captured = traincast.load("dlrm-v2", optimizer=optimizer, batch_size=BATCH, dtype=dtype).programs[0]
    recorded = _steps(captured)
    assert len([step for step in recorded if step[2] == Phase.FORWARD]) > 40
    for program in _sharded(optimizer, ranks, dtype).programs:
        for mine, theirs in zip(_steps(program), recorded, strict=True):
            assert mine == theirs


@pytest.mark.parametrize(("optimizer", "dtype"), [("adagrad", "fp32"), ("sgd", "fp32"), ("sgd", "bf16")])
def test_activations_live_as_long(optimizer: str, dtype: str) -> None:
    # Given what the dense ops allocate, from which to which of them; the loss is the loop's own to keep or drop
    captured = traincast.load("dlrm-v2", optimizer=optimizer, batch_size=BATCH, dtype=dtype).programs[0]
    for program in _sharded(optimizer, 4, dtype).programs:
        ours, theirs = (
            {life for life in lives(each, [index for index, _ in _dense(each)]) if life.nbytes > 4 and life.alloc >= 0}
            for each in (program, captured)
        )
        assert len(theirs) > 60
        assert ours == theirs


def test_gradients_of_all_modules_are_reduced_together() -> None:
    # Given one DDP around everything, then every parameter is reduced once
    dense = DLRM_V2.parameters - sum(DLRM_V2.rows_per_table) * DLRM_V2.embedding_dim
    for program in _sharded("sgd", 4).programs:
        reduced = [op for op in program.ops if op.signature.scalar("collective") == "all_reduce"]
        assert sum(int(op.signature.scalar("bytes")) for op in reduced) == 4 * dense


def test_tables_are_those_of_the_benchmark() -> None:
    assert load_described_dlrm("dlrm-v2") is DLRM_V2
    tables = make_dlrm_tables(replace(DLRM_V2, optimizer="adagrad"))
    assert [table.rows for table in tables] == list(DLRM_V2.rows_per_table)
    assert [table.pooling.mean for table in tables] == list(DLRM_V2.lookups_per_table)
    assert {table.optimizer for table in tables} == {"adagrad"}
    assert {table.optimizer for table in make_dlrm_tables(DLRM_V2)} == {"sgd"}


def test_predicted_on_eight_gpus() -> None:
    result = traincast.predict("dlrm-v2", on="dgx-h100", gpus=8)
    alone = traincast.predict("dlrm-v2", on="dgx-h100")
    assert result.gpus == 8 and result.estimated_ops == ()
    assert any("cross network under DDP" in said for said in result.warnings)
    assert alone.iteration < result.iteration < 2 * alone.iteration
    # 104.6 GB of tables over eight GPUs
    assert sum(rank.memory.by_kind["embedding_table"] for rank in result.ranks) == pytest.approx(
        4 * 128 * sum(DLRM_V2.rows_per_table), rel=1e-4
    )


def test_without_an_update() -> None:
    workload, _ = build_hybrid_variant(DLRM_V2, 2, load_platform("dgx-h100"), Scenario(batch_size=64, optimizer="none"))
    assert not [op for op in workload.programs[0].ops if op.phase == Phase.OPTIMIZER]


def test_any_kind_of_sharding_can_stand_below_the_cross_network() -> None:
    tables = make_dlrm_tables(DLRM_V2)[:6]
    placements = (
        Placement("table_wise", (0,)), Placement.make_row_wise(4), Placement("column_wise", (0, 1, 2, 3)),
        Placement("table_row_wise", (2, 3)), Placement.make_data_parallel(4), Placement("table_wise", (3,)),
    )  # fmt: skip
    plan = Plan(tuple(table.name for table in tables), placements, 4)
    workload = build_sharded_dlrm(Dense.from_dlrm(DLRM_V2), tables, plan, batch_size=64, gpus_per_node=2)
    validate_workload(workload)
    width = 7 * 128
    for program in workload.programs:
        (narrow, *_) = [op for op in program.ops if op.module == "Dlrm.cross" and op.name == "aten::mm"]
        assert [spec.shape for spec in narrow.signature.inputs] == [(64, width), (width, 512)]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"cross_layers": 0}, "cross_layers"), ({"interaction": "dot"}, "'cat'"), ({"loss": "mse"}, "'bce'")],
)
def test_what_a_cross_network_cannot_have(change: dict[str, object], said: str) -> None:
    with pytest.raises(TraincastError, match=said):
        DcnDense(**{"bottom_mlp": (13, 128), "top_mlp": (64, 1), "cross_layers": 3, "cross_rank": 512, **change})


def test_tables_of_another_width_are_refused() -> None:
    tables = [replace(make_dlrm_tables(DLRM_V2)[5], dim=64)]
    plan = Plan((tables[0].name,), (Placement("table_wise", (0,)),), 1)
    with pytest.raises(TraincastError, match="cross network"):
        build_sharded_dlrm(Dense.from_dlrm(DLRM_V2), tables, plan, batch_size=8)
