"""A sharded DLRM written without torch is the hybrid-parallel DLRM that is captured, where both say the same thing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from tests.evaluation.zoo.hybrid_dlrm import hybrid_dlrm_step
from tests.models.programs.lives import Life, lives
from traincast.capturing import capture_distributed
from traincast.ir import Program, Signature, StorageKind, Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.embeddings import Pooling, Table
from traincast.models.placement import Placement, Plan
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.step import build_sharded_dlrm

BATCH = 16
CONFIG = DlrmConfig(
    name="small",
    bottom_mlp=(13, 64, 32),
    top_mlp=(48, 1),
    rows_per_table=(1000, 2000, 3000, 700, 50),
    embedding_dim=32,
    lookups_per_table=(1, 4, 2, 1, 7),
    embedding="fbgemm",
)
WIDE = replace(CONFIG, bottom_mlp=(13, 1100, 32), top_mlp=(700, 700, 1))  # several buckets
OWNERS = {"dealt": ([0, 2, 4], [1, 3]), "one has none": ([0, 1, 2, 3, 4], []), "even": ([0, 1], [2, 3])}
# what only one of them says: where rows are (ours), heights and dims of each table (captured)
_LEFT_OUT = ("load", "longest_bag", "total_rows", "rows", "dims")
_HOST_ONLY = ("aten::empty", "aten::new_empty")


def _tables(config: DlrmConfig) -> list[Table]:
    return [
        Table(
            name=f"t{i}", rows=rows, dim=config.embedding_dim, pooling=Pooling.from_constant(lookups), optimizer="sgd"
        )
        for i, (rows, lookups) in enumerate(zip(config.rows_per_table, config.lookups_per_table, strict=True))
    ]


def _plain(signature: Signature) -> Signature:
    scalars = tuple((name, value) for name, value in signature.scalars if name not in _LEFT_OUT)
    return replace(signature, scalars=scalars)


def _steps(program: Program, skipped: Sequence[str] = ()) -> Iterator[tuple[object, ...]]:
    """Every op that the device or another rank sees, with where it runs and under which host op."""
    for op in program.ops:
        views = op.name in ("aten::view", "aten::_unsafe_view", "aten::lift_fresh")
        scope = program.scopes[op.scope].name
        if op.name not in _HOST_ONLY and not views and scope not in skipped:
            yield _plain(op.signature), op.stream, op.thread, op.phase, scope


def _lives(program: Program) -> list[Life]:
    """Lives of all storages, counted in the ops above, the largest first.

    Two kinds are named otherwise there: DDP's buckets, and optimizer state that is a buffer of the tables' module.
    """
    views = ("aten::view", "aten::_unsafe_view", "aten::lift_fresh")
    seen = [op.index for op in program.ops if op.name not in (*_HOST_ONLY, *views)]
    kept = (StorageKind.OPTIMIZER_STATE, StorageKind.GRADIENT)
    found = [
        life._replace(kind=StorageKind.BUFFER)
        if life.kind in kept and life.alloc < 0 and life.free == len(seen)
        else life
        for life in lives(program, seen)
    ]
    return sorted(found, reverse=True)


def _scopes(program: Program, skipped: Sequence[str]) -> list[tuple[str, int]]:
    """Top-level host ops. A reshape of the pooled embeddings is two views there, one here."""
    left_out = (*_HOST_ONLY, *skipped, "aten::view", "aten::reshape", "ViewBackward0")
    return [(scope.name, scope.thread) for scope in program.scopes if scope.name not in left_out]


@pytest.mark.parametrize("owners", OWNERS, ids=str)
@pytest.mark.parametrize(
    "config",
    [CONFIG, WIDE, replace(CONFIG, interaction="cat", loss="mse"), replace(CONFIG, index_dtype="int64")],
    ids=["dot", "several-buckets", "cat-mse", "int64"],
)
def test_table_wise_is_what_a_capture_records(config: DlrmConfig, owners: str) -> None:
    placement = OWNERS[owners]
    used = sorted(t for tables in placement for t in tables)
    config = replace(
        config,
        rows_per_table=tuple(config.rows_per_table[t] for t in used),
        lookups_per_table=tuple(config.lookups_per_table[t] for t in used),
    )
    captured = capture_distributed(
        hybrid_dlrm_step(config, placement), world_size=2, batch_size=BATCH, name="captured", rebatch=False
    )

    tables = _tables(config)
    where = {t: rank for rank, owned in enumerate(placement) for t in owned}
    plan = Plan(
        tuple(t.name for t in tables), tuple(Placement("table_wise", (where[i],)) for i in range(len(tables))), 2
    )
    written = build_sharded_dlrm(config, tables, plan, batch_size=BATCH, redistribute_inputs=False)

    for rank in range(2):
        ours, theirs = written.programs[written.ranks[rank]], captured.programs[captured.ranks[rank]]
        # a rank without tables copies and differentiates an empty tensor there, and nothing here
        skipped = () if placement[rank] else ("aten::to", "torch::autograd::AccumulateGrad")
        assert _scopes(ours, skipped) == _scopes(theirs, skipped)
        for mine, recorded in zip(_steps(ours, skipped), _steps(theirs, skipped), strict=True):
            assert mine == recorded


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_other_optimizers_step_as_captured(optimizer: str) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    captured = capture_distributed(
        hybrid_dlrm_step(config, OWNERS["dealt"]), world_size=2, batch_size=BATCH, name="captured", rebatch=False
    )
    tables = [replace(table, optimizer=optimizer) for table in _tables(config)]
    where = (0, 1, 0, 1, 0)
    plan = Plan(tuple(t.name for t in tables), tuple(Placement("table_wise", (rank,)) for rank in where), 2)
    written = build_sharded_dlrm(config, tables, plan, batch_size=BATCH, redistribute_inputs=False)
    for mine, recorded in zip(_steps(written.programs[0]), _steps(captured.programs[0]), strict=True):
        assert mine == recorded


@pytest.mark.parametrize(
    ("optimizer", "interaction", "loss", "index_dtype"),
    [("sgd", "dot", "bce", "int32"), ("adagrad", "cat", "mse", "int64"), ("adam", "dot", "mse", "int32")],
)
def test_storages_live_as_captured(optimizer: str, interaction: str, loss: str, index_dtype: str) -> None:
    config = replace(WIDE, optimizer=optimizer, interaction=interaction, loss=loss, index_dtype=index_dtype)
    captured = capture_distributed(
        hybrid_dlrm_step(config, OWNERS["dealt"]), world_size=2, batch_size=BATCH, name="captured", rebatch=False
    )
    tables = [replace(table, optimizer=optimizer) for table in _tables(config)]
    plan = Plan(tuple(t.name for t in tables), tuple(Placement("table_wise", (i % 2,)) for i in range(5)), 2)
    written = build_sharded_dlrm(config, tables, plan, batch_size=BATCH, redistribute_inputs=False)
    _check_lives(written, captured)


@pytest.mark.parametrize(("interaction", "loss"), [("dot", "bce"), ("cat", "mse")])
def test_under_autocast_it_is_what_a_capture_records(interaction: str, loss: str) -> None:
    config = replace(WIDE, interaction=interaction, loss=loss)
    captured = capture_distributed(
        hybrid_dlrm_step(config, OWNERS["dealt"], half=torch.bfloat16),
        world_size=2, batch_size=BATCH, name="captured", rebatch=False,
    )  # fmt: skip
    tables = _tables(config)
    plan = Plan(tuple(t.name for t in tables), tuple(Placement("table_wise", (i % 2,)) for i in range(5)), 2)
    dense = replace(Dense.from_dlrm(config), half="bfloat16")
    written = build_sharded_dlrm(dense, tables, plan, batch_size=BATCH, redistribute_inputs=False)
    for rank in range(2):
        ours, theirs = written.programs[written.ranks[rank]], captured.programs[captured.ranks[rank]]
        for mine, recorded in zip(_steps(ours), _steps(theirs), strict=True):
            assert mine == recorded
    _check_lives(written, captured)


def _check_lives(written: Workload, captured: Workload) -> None:
    for rank in range(2):
        ours, theirs = _lives(written.programs[written.ranks[rank]]), _lives(captured.programs[captured.ranks[rank]])
        assert set(ours) == set(theirs)
        assert len(ours) == len(theirs)
