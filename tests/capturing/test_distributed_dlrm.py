"""A DLRM with its tables spread over ranks and its MLPs on all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.evaluation.zoo.hybrid_dlrm import hybrid_dlrm_step
from traincast.capturing import capture_distributed
from traincast.ir import Program
from traincast.ir.validate import validate_workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.utils.errors import TraincastError

BATCH, DIM, WORLD = 8, 16, 3
CONFIG = DlrmConfig(
    name="small",
    bottom_mlp=(13, 32, DIM),
    top_mlp=(64, 1),
    rows_per_table=(1000, 2000, 3000, 4000, 5000, 6000, 7000),
    embedding_dim=DIM,
    lookups_per_table=(2, 1, 1, 3, 1, 1, 1),
)


def exchanges(program: Program):
    return [op for op in program.ops if op.name == "c10d::alltoall_base_"]


@pytest.mark.parametrize("embedding", ["batched", "bag", "fbgemm"])
def test_every_rank_sends_what_the_others_receive(embedding):
    # Given 7 tables dealt out to 3 ranks: 3, 2 and 2 of them
    make_step = hybrid_dlrm_step(replace(CONFIG, embedding=embedding))

    # When all ranks are captured
    workload = capture_distributed(make_step, world_size=WORLD, batch_size=BATCH, name="hybrid")
    validate_workload(workload)
    assert [p.rigid for p in workload.programs] == [""] * len(workload.programs)

    # Then each sends its tables' rows of every rank's samples forward, and their gradients come back the same way
    programs = [workload.programs[p] for p in workload.ranks]
    row = BATCH * DIM * 4
    for rank, (program, tables) in enumerate(zip(programs, (3, 2, 2), strict=True)):
        forward, backward = (dict(op.signature.scalars) for op in exchanges(program))
        assert forward["collective"] == backward["collective"] == "all_to_all_v"
        assert forward["send_splits"] == backward["recv_splits"] == (tables * row,) * WORLD
        assert forward["recv_splits"] == backward["send_splits"] == (3 * row, 2 * row, 2 * row)
        assert forward["bytes"] == tables * row * WORLD, rank


def test_ranks_with_as_many_tables_share_a_template():
    workload = capture_distributed(hybrid_dlrm_step(CONFIG), world_size=WORLD, batch_size=BATCH, name="hybrid")
    assert workload.ranks == (0, 1, 2)
    three, two, other_two = workload.programs
    assert two.columns is other_two.columns and two.columns is not three.columns
    lookups = [next(op for op in p.ops if "batched_embedding_forward" in op.name) for p in (two, other_two)]
    assert [op.inputs[2].spec.shape for op in lookups] == [(BATCH * WORLD * 2,)] * 2
    assert [op.signature.scalar("rows") for op in lookups] == [(2000, 5000), (3000, 6000)]


def test_exchanges_overlap_with_the_bottom_mlp():
    program = capture_distributed(
        hybrid_dlrm_step(CONFIG), world_size=WORLD, batch_size=BATCH, name="hybrid", rebatch=False
    ).programs[0]
    for exchange in exchanges(program):
        done = program.ops[exchange.index + 1].signature.scalar("event")
        waited = next(
            op.index for op in program.ops
            if op.name == "cuda::stream_wait_event" and op.signature.scalar("event") == done
        )  # fmt: skip
        between = [op for op in program.ops[exchange.index : waited] if op.name in ("aten::mm", "aten::addmm")]
        assert between and all(op.module.startswith("HybridDlrm.bottom") for op in between)


def test_a_rank_without_tables_takes_part():
    placement = [[0, 1, 2, 3], [], [4, 5, 6]]
    workload = capture_distributed(
        hybrid_dlrm_step(CONFIG, placement), world_size=WORLD, batch_size=BATCH, name="hybrid", rebatch=False
    )
    forward, backward = exchanges(workload.programs[workload.ranks[1]])
    assert forward.signature.scalar("send_splits") == backward.signature.scalar("recv_splits") == (0, 0, 0)
    assert forward.signature.scalar("recv_splits") == tuple(n * BATCH * DIM * 4 for n in (4, 0, 3))

    # and all ranks call the collectives in one order
    orders = [[op.name for op in p.ops if op.name.startswith("c10d::")] for p in workload.programs]
    assert len(orders) == 3 and orders[0] == orders[1] == orders[2]


def test_a_placement_that_forgets_a_table_is_refused():
    with pytest.raises(TraincastError, match="each of 7 tables to one of 3 ranks"):
        capture_distributed(
            hybrid_dlrm_step(CONFIG, [[0, 1], [2, 3], [4, 5]]), world_size=WORLD, batch_size=BATCH, name="hybrid"
        )
