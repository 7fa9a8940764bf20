"""Collectives as ops of a program: what they carry, which streams they run on, and which ranks share a program."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from traincast.capturing import capture_distributed, capture_step
from traincast.ir import Phase, Program
from traincast.ir.file import load_workload, save_workload
from traincast.ir.validate import validate_workload
from traincast.utils.errors import TraincastError

WORLD = 4


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda")


def captured(run, *, rank: int = 1) -> Program:
    """The program of one rank of four that calls `run(rank)` in its step."""

    def make_step(batch, *, rank, world_size):
        weight = zeros(batch, 4)

        def step():
            _ = weight + 1
            run(rank)

        return step

    workload = capture_distributed(make_step, world_size=WORLD, batch_size=2, name="x", rebatch=False)
    validate_workload(workload)
    return workload.programs[workload.ranks[rank]]


def collectives(program: Program):
    return [op for op in program.ops if op.signature.scalar("collective") is not None]


def told(op) -> dict[str, object]:
    return dict(op.signature.scalars)


COLLECTIVES = {
    "all_reduce": (lambda r: dist.all_reduce(zeros(8)), "all_reduce", 32),
    "all_reduce list": (lambda r: dist.all_reduce_coalesced([zeros(8), zeros(2)]), "all_reduce", 40),
    "all_gather": (lambda r: dist.all_gather([zeros(8) for _ in range(WORLD)], zeros(8)), "all_gather", 128),
    "all_gather tensor": (lambda r: dist.all_gather_into_tensor(zeros(32), zeros(8)), "all_gather", 128),
    "reduce_scatter": (
        lambda r: dist.reduce_scatter(zeros(8), [zeros(8) for _ in range(WORLD)]), "reduce_scatter", 128,
    ),
    "reduce_scatter tensor": (lambda r: dist.reduce_scatter_tensor(zeros(8), zeros(32)), "reduce_scatter", 128),
    "all_to_all": (lambda r: dist.all_to_all_single(zeros(8), zeros(8)), "all_to_all", 32),
    "all_to_all list": (lambda r: dist.all_to_all(list(zeros(4, 8)), list(zeros(4, 8))), "all_to_all", 128),
    "broadcast": (lambda r: dist.broadcast(zeros(8), 2), "broadcast", 32),
    "reduce": (lambda r: dist.reduce(zeros(8), 2), "reduce", 32),
    "barrier": (lambda r: dist.barrier(), "barrier", 4),
    "functional all_reduce": (lambda r: functional.all_reduce(zeros(8), "sum", dist.group.WORLD) + 1, "all_reduce", 32),
    "functional all_gather": (
        lambda r: functional.all_gather_tensor(zeros(8), 0, dist.group.WORLD) + 1, "all_gather", 128,
    ),
    "functional reduce_scatter": (
        lambda r: functional.reduce_scatter_tensor(zeros(8), "sum", 0, dist.group.WORLD) + 1, "reduce_scatter", 32,
    ),
    "functional all_to_all": (
        lambda r: functional.all_to_all_single(zeros(8), None, None, dist.group.WORLD) + 1, "all_to_all", 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_kind_group_and_bytes(name):
    run, kind, nbytes = COLLECTIVES[name]
    (op,) = collectives(captured(run))
    assert (told(op)["collective"], told(op)["bytes"]) == (kind, nbytes)
    assert told(op)["group"] == (0, 1, 2, 3)
    assert told(op)["async_op"] == name.startswith("functional")
    assert told(op).get("root") == (2 if kind in ("broadcast", "reduce") else None)
    assert "send_splits" not in told(op)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_streams_wait_for_each_other(name):
    program = captured(COLLECTIVES[name][0])
    (op,) = collectives(program)
    around = [o for o in program.ops if o.name in ("cuda::event_record", "cuda::stream_wait_event")]
    assert [(o.name.split("::")[1], o.stream) for o in around] == [
        ("event_record", 0), ("stream_wait_event", 1), ("event_record", 1), ("stream_wait_event", 0),
    ]  # fmt: skip
    assert op.stream == 1
    assert around[1].index < op.index < around[2].index
    events = [o.signature.scalar("event") for o in around]
    assert events[0] == events[1] != events[2] == events[3]


def test_uneven_all_to_all_carries_its_splits_in_bytes():
    program = captured(lambda r: dist.all_to_all_single(zeros(8, 3), zeros(10, 3), [1, 2, 3, 2], [4, 2, 2, 2]))
    (op,) = collectives(program)
    assert told(op)["collective"] == "all_to_all_v"
    assert (told(op)["send_splits"], told(op)["recv_splits"]) == ((48, 24, 24, 24), (12, 24, 36, 24))
    assert told(op)["bytes"] == 120


def test_gather_and_scatter_are_uneven_all_to_alls():
    def run(rank):
        dist.gather(zeros(8), [zeros(8) for _ in range(WORLD)] if rank == 0 else None, dst=0)
        dist.scatter(zeros(8), [zeros(8) for _ in range(WORLD)] if rank == 0 else None, src=0)

    for rank, (sent, received) in {0: ((32, 0, 0, 0), (32,) * 4), 1: ((32, 0, 0, 0), (0,) * 4)}.items():
        gather, scatter = collectives(captured(run, rank=rank))
        assert (told(gather)["send_splits"], told(gather)["recv_splits"]) == (sent, received)
        assert (told(scatter)["send_splits"], told(scatter)["recv_splits"]) == (received, sent)


def test_an_asynchronous_collective_is_waited_for_where_the_script_waits():
    def run(rank):
        x, y = zeros(8), zeros(8)
        work = dist.all_reduce(x, async_op=True)
        y.mul_(2)
        work.wait()
        x.add_(1)

    program = captured(run)
    (op,) = collectives(program)
    names = [o.name for o in program.ops[op.index :]]
    assert names[1:] == ["cuda::event_record", "aten::mul_", "cuda::stream_wait_event", "aten::add_"]
    assert told(op)["async_op"] is True


def test_functional_results_are_waited_for_when_they_are_used():
    def run(rank):
        x = functional.all_reduce(zeros(8), "sum", dist.group.WORLD)
        zeros(8).mul_(2)
        x.view(2, 4).add_(1)

    program = captured(run)
    (op,) = collectives(program)
    names = [o.name for o in program.ops[op.index :] if o.name != "aten::zeros"]
    assert names[1:] == ["cuda::event_record", "aten::mul_", "aten::view", "cuda::stream_wait_event", "aten::add_"]
    assert program.ops[op.index - 3].name == "aten::clone"  # it works on a copy of its input


def test_a_barrier_makes_the_host_wait():
    assert [op.name for op in captured(lambda r: dist.barrier()).ops][-1] == "cuda::stream_synchronize"


def test_messages_name_both_ends_and_pairs_have_streams_of_their_own():
    def run(rank):
        if rank == 1:
            dist.send(zeros(8), 2)
            dist.recv(zeros(4), 0)
        elif rank == 2:
            dist.recv(zeros(8), 1)
        elif rank == 0:
            dist.send(zeros(4), 1)

    sent, received = collectives(captured(run))
    assert (told(sent)["source"], told(sent)["target"], told(sent)["bytes"]) == (1, 2, 32)
    assert (told(received)["source"], told(received)["target"], told(received)["bytes"]) == (0, 1, 16)
    assert (sent.stream, received.stream) == (1, 2)
    assert not collectives(captured(run, rank=3))


def test_messages_of_one_batch_do_not_wait_for_each_other():
    def run(rank):
        x, y = zeros(8), zeros(8)
        other = rank ^ 1
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
            work.wait()

    sent, received = collectives(captured(run))
    assert sent.stream != received.stream
    assert (told(sent)["source"], told(received)["source"]) == (1, 0)


def test_groups_have_streams_and_communicators_of_their_own():
    # Given ranks in pairs, and a second communicator of all ranks
    def make_step(batch, *, rank, world_size):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        everyone = dist.new_group(list(range(world_size)), backend="gloo")
        mine = pairs[rank // 2]
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        assert (dist.get_rank(mine), dist.get_world_size(mine)) == (rank % 2, 2)
        x = zeros(batch, 4)

        def step():
            for group in (mine, everyone, dist.group.WORLD):
                dist.all_reduce(x, group=group, async_op=True).wait()

        return step

    # When it is captured
    workload = capture_distributed(make_step, world_size=WORLD, batch_size=2, name="x")

    # Then pairs share a program, and the two programs share everything but their numbers
    assert workload.ranks == (0, 0, 1, 1)
    first, second = workload.programs
    assert first.columns is second.columns and first.symbolic is second.symbolic
    ours = [(told(op)["group"], told(op)["communicator"], op.stream) for op in collectives(first)]
    assert ours == [((0, 1), 1, 1), ((0, 1, 2, 3), 3, 2), ((0, 1, 2, 3), 0, 3)]
    assert told(collectives(second)[0])["group"] == (2, 3)


def sharded(batch, *, rank, world_size):
    """Tables of different height on every rank, all-to-all of what was looked up."""
    table = nn.Embedding(100 * (rank + 1), 8).cuda()
    indices = torch.zeros(batch * world_size, dtype=torch.long, device="cuda")

    def step():
        out = zeros(batch * world_size, 8)
        dist.all_to_all_single(out, table(indices).detach())

    return step


def test_ranks_that_differ_in_shards_share_a_template_and_can_be_rebatched():
    workload = capture_distributed(sharded, world_size=3, batch_size=16, name="x")
    assert workload.ranks == (0, 1, 2)
    assert len({id(p.columns) for p in workload.programs}) == len({id(p.symbolic) for p in workload.programs}) == 1
    tables = [next(op for op in p.ops if op.name == "aten::embedding").inputs[0] for p in workload.programs]
    assert [table.spec.shape for table in tables] == [(100, 8), (200, 8), (300, 8)]

    larger = workload.resized(batch_size=50)
    fresh = capture_distributed(sharded, world_size=3, batch_size=50, name="x", rebatch=False)
    for ours, theirs in zip(larger.programs, fresh.programs, strict=True):
        assert ours.ops == theirs.ops


def test_a_workload_of_many_ranks_survives_its_file(tmp_path):
    workload = capture_distributed(sharded, world_size=3, batch_size=16, name="x")
    save_workload(workload, tmp_path / "x.tc")
    again = load_workload(tmp_path / "x.tc")
    assert again.ranks == workload.ranks
    assert [p.ops for p in again.programs] == [p.ops for p in workload.programs]


def test_ranks_that_are_left_out_run_the_program_below_them():
    def make_step(batch, *, rank, world_size):
        x = zeros(batch, 8 if rank < 512 else 16)
        return lambda: dist.all_reduce(x)

    workload = capture_distributed(make_step, world_size=1024, batch_size=2, name="x", ranks=[0, 512])
    assert workload.ranks == (0,) * 512 + (1,) * 512
    assert len(told(collectives(workload.programs[1])[0])["group"]) == 1024


def test_a_rank_that_cannot_run_the_program_below_it_must_be_captured():
    def make_step(batch, *, rank, world_size):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return lambda: dist.all_reduce(zeros(batch), group=pairs[rank // 2])

    with pytest.raises(TraincastError, match="add 2 to `ranks`"):
        capture_distributed(make_step, world_size=WORLD, batch_size=2, name="x", ranks=[0])
    workload = capture_distributed(make_step, world_size=WORLD, batch_size=2, name="x", ranks=[0, 2])
    assert workload.ranks == (0, 0, 1, 1)


def test_scripts_that_make_their_own_process_group():
    def make_step(batch, *, rank, world_size):
        dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world_size)
        assert dist.is_initialized()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world_size))
        x = zeros(batch)
        dist.destroy_process_group()
        return lambda: dist.all_reduce(x)

    hook, environment = sys.excepthook, dict(os.environ)
    workload = capture_distributed(make_step, world_size=2, batch_size=4, name="x")
    assert workload.ranks == (0, 0)
    assert not dist.is_initialized()
    assert sys.excepthook is hook and dict(os.environ) == environment


def test_collectives_of_custom_functions_in_backward():
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x)
            return out

        @staticmethod
        def backward(ctx, grad):
            out = torch.empty_like(grad)
            dist.all_to_all_single(out, grad.contiguous())
            return out

    def make_step(batch, *, rank, world_size):
        model, x = nn.Linear(8, 8).cuda(), zeros(batch * world_size, 8)
        return lambda: (Exchange.apply(model(x)) * 2).sum().backward()

    program = capture_distributed(make_step, world_size=2, batch_size=4, name="x").programs[0]
    forward, backward = collectives(program)
    assert (backward.phase, backward.thread) == (Phase.BACKWARD, 1)
    assert program.ops[backward.forward].scope == forward.scope
    assert {op.stream for op in program.ops if op.name.startswith("aten::")} == {0}
    assert program.rigid == ""


BAD = {
    "host tensors": (
        lambda: (dist.init_process_group("nccl"), dist.all_reduce(torch.zeros(2))),
        "NCCL has no all_reduce of host tensors; put them on cuda, or call init_process_group with 'cpu:gloo",
    ),
    "values": (lambda: bool(torch.randn(2, device="cuda").sum()), "needs the values"),
}


def test_what_hosts_exchange_is_left_out_and_it_is_said():
    totals: dict[int, list[int]] = {}

    def make_step(batch, *, rank, world_size):
        dist.init_process_group("cpu:gloo,cuda:nccl")
        x, norm = zeros(batch), torch.tensor(rank + 1)
        seen = totals.setdefault(rank, [])

        def step():
            total = norm.clone()
            dist.all_reduce(total)
            seen.append(total.item())
            return x + 1

        return step

    workload = capture_distributed(make_step, world_size=2, batch_size=2, name="x", rebatch=False)
    assert [seen[-1] for seen in totals.values()] == [3, 3]
    assert not collectives(workload.programs[0])
    (text,) = workload.assumptions
    assert "all_reduce of 8 bytes between hosts is taken to cost nothing" in text


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_line(name):
    run, message = BAD[name]
    with pytest.raises(TraincastError, match=rf"test_distributed.py:\d+: .*{message}"):
        captured(lambda rank: run())
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world size 0 is out of range"),
        ({"ranks": [1]}, "must start with 0"),
        ({"ranks": [0, 9]}, "stay below the world size 2"),
        ({"make_step": lambda batch: None}, "must take rank and world_size by name"),
        ({"batch_size": 0}, "batch size 0 is out of range"),
    ],
)
def test_bad_requests(options, message):
    request = {"make_step": sharded, "world_size": 2, "batch_size": 4, "name": "x", **options}
    with pytest.raises(TraincastError, match=message):
        capture_distributed(request.pop("make_step"), **request)


def test_another_rank_than_the_given_one_is_refused():
    def make_step(batch, *, rank, world_size):
        dist.init_process_group("nccl", rank=rank, world_size=world_size + 1)

    with pytest.raises(TraincastError, match="world_size=3, but the capture has world_size 2"):
        capture_distributed(make_step, world_size=2, batch_size=4, name="x")


def test_a_collective_without_other_ranks_is_refused():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(TraincastError, match="say how many GPUs"):
            capture_step(lambda batch: lambda: dist.all_reduce(zeros(batch)), batch_size=2, name="x")
        with pytest.raises(TraincastError, match="already has a process group"):
            capture_distributed(sharded, world_size=2, batch_size=2, name="x")
    finally:
        dist.destroy_process_group()
