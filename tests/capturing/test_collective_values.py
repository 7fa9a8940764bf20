"""Numbers that ranks send each other in collectives: known where all ranks are captured, assumed where not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from traincast.capturing import capture_distributed


def uneven(batch, *, rank, world_size):
    """Ranks that first say how many rows they send to whom, and then send them: rank r sends (r + 1) rows per
    sample."""
    counts = torch.tensor([batch * (rank + 1) * (other + 1) for other in range(world_size)], device="cuda")
    rows = torch.zeros(int(counts.sum()), 4, device="cuda")

    def step():
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = counts.tolist(), theirs.tolist()
        dist.all_to_all_single(torch.empty(sum(received), 4, device="cuda"), rows, received, sent)

    return step


def splits(program):
    (op,) = [op for op in program.ops if op.signature.scalar("collective") == "all_to_all_v"]
    return op.signature.scalar("send_splits"), op.signature.scalar("recv_splits")


def test_ranks_know_what_the_others_send_and_need_no_assumption():
    # Given three ranks that send each other different numbers of rows, when all are captured
    workload = capture_distributed(uneven, world_size=3, batch_size=5, name="x")

    # Then each receives what the others send, and nothing was assumed
    row = 5 * 4 * 4
    for rank, program in enumerate(workload.programs[i] for i in workload.ranks):
        sent = tuple(row * (rank + 1) * (other + 1) for other in range(3))
        received = tuple(row * (other + 1) * (rank + 1) for other in range(3))
        assert splits(program) == (sent, received)
    assert workload.assumptions == ()

    # and at other sizes too
    larger = workload.resized(batch_size=50)
    assert splits(larger.programs[larger.ranks[2]])[1] == (30 * row, 60 * row, 90 * row)


def test_numbers_of_ranks_that_are_not_captured_are_assumed_and_it_is_said():
    workload = capture_distributed(uneven, world_size=3, batch_size=5, name="x", ranks=[0, 1, 2])
    assert workload.assumptions == ()

    def alike(batch, *, rank, world_size):
        return uneven(batch, rank=0, world_size=world_size)

    workload = capture_distributed(alike, world_size=3, batch_size=5, name="x", ranks=[0])
    (text,) = workload.assumptions
    assert text.startswith("test_collective_values.py:") and "other ranks send here are taken to be" in text
    assert splits(workload.programs[0])[1] == (80, 80, 80)  # three times what it sends itself


def test_numbers_that_nobody_reads_are_not_assumed():
    def make_step(batch, *, rank, world_size):
        tokens, x = torch.tensor(batch, device="cuda"), torch.zeros(batch, device="cuda")

        def step():
            dist.all_reduce(tokens)
            return x / tokens

        return step

    assert capture_distributed(make_step, world_size=2, batch_size=4, name="x", ranks=[0]).assumptions == ()


def test_sums_gathers_and_broadcasts_are_those_of_all_ranks():
    seen = {}

    def make_step(batch, *, rank, world_size):
        x = torch.tensor([rank + 1, 10 * (rank + 1)], device="cuda")

        def step():
            total, largest, root = x.clone(), x.clone(), x.clone()
            dist.all_reduce(total)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.broadcast(root, src=1)
            gathered = [torch.empty_like(x) for _ in range(world_size)]
            dist.all_gather(gathered, x)
            seen[rank] = [total.tolist(), largest.tolist(), root.tolist(), torch.cat(gathered).tolist()]

        return step

    capture_distributed(make_step, world_size=3, batch_size=4, name="x", rebatch=False)
    assert seen == {rank: [[6, 60], [3, 30], [2, 20], [1, 10, 2, 20, 3, 30]] for rank in range(3)}
