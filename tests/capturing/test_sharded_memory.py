"""Memory of steps on several GPUs, counted by hand: `fully_shard`, collectives that are not waited for, lookups."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from traincast.capturing import capture_distributed, capture_step
from traincast.ir import compute_peak_memory
from traincast.ir.memory import list_memory_events

WIDTH, RANKS = 512, 64
WHOLE = 4 * WIDTH * WIDTH  # bytes of a layer's parameters
SHARD = WHOLE / RANKS


def peak(layers: int) -> int:
    def make_step(batch, *, rank, world_size):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).cuda()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.zeros(batch, WIDTH, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    workload = capture_distributed(make_step, world_size=RANKS, ranks=[0], batch_size=1, name="x", rebatch=False)
    return compute_peak_memory(workload.programs[0]).peak_bytes


def test_a_layer_more_takes_its_shards_and_no_whole_parameters():
    few, many = peak(8), peak(12)

    # parameter and two moments of every layer are held, gradients of those that backward has passed
    assert 3 * SHARD <= (many - few) / 4 <= 4.25 * SHARD
    # alongside them a few layers are whole: the one that computes, the one gathered ahead, what is reduced
    assert few - 8 * 4 * SHARD <= 5 * WHOLE


def list_lifetimes(*, wait_first: bool) -> dict[int, tuple[int, int]]:
    """Ticks at which large blocks come and go in a step that exchanges one tensor and then makes another, by bytes."""

    def make_step(batch, *, rank, world_size):
        received = torch.zeros(2 * batch, device="cuda")

        def step():
            sent = torch.ones(2 * batch, device="cuda") * 2
            work = dist.all_to_all_single(received, sent, async_op=True)
            if wait_first:
                work.wait()
            del sent
            made = torch.ones(3 * batch, device="cuda")
            if not wait_first:
                work.wait()
            return made

        return step

    workload = capture_distributed(make_step, world_size=2, ranks=[0], batch_size=1 << 20, name="x", rebatch=False)
    events = list_memory_events(workload.programs[0])
    return {
        int(nbytes): (int(born), int(gone))
        for nbytes, born, gone in zip(events.nbytes, events.born, events.gone, strict=True)
        if born >= 0
    }


def test_a_collective_keeps_what_it_sends_until_somebody_waits():
    kept, released = list_lifetimes(wait_first=False), list_lifetimes(wait_first=True)
    sent, made = 8 << 20, 12 << 20

    assert kept[sent][1] > kept[made][0]  # both are there at once
    assert released[sent][1] < released[made][0]


def test_what_a_lookup_read_goes_with_its_backward_pass_though_the_output_stays():
    fbgemm = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    lookups = 1 << 20

    def make_step(batch):
        tables = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [(1000, 8, EmbeddingLocation.DEVICE, fbgemm.ComputeDevice.CUDA)], device=torch.device("cuda")
        )
        offsets = torch.arange(batch + 1, device="cuda") * (lookups // batch)
        kept = []

        def step():
            rows = torch.zeros(lookups, dtype=torch.int64, device="cuda") + 1
            pooled = tables(rows, offsets)
            pooled.sum().backward()
            kept[:] = [pooled]  # with its graph, until the next step's takes its place

        return step

    program = capture_step(make_step, batch_size=4, name="x", rebatch=False).programs[0]
    events = list_memory_events(program)
    before = [
        int(gone) for nbytes, born, gone in zip(events.nbytes, events.born, events.gone, strict=True)
        if nbytes == 8 * lookups and born < 0
    ]  # fmt: skip

    # FBGEMM's module holds the last rows it read until it is called again; the graph of the last step holds none
    assert before
    assert max(before) < events.ticks // 2
