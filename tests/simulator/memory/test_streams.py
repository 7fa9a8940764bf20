"""Blocks that another stream works on when they are freed: given out again when that stream is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import traincast
from traincast.capturing import capture_step
from traincast.simulator.memory.device_memory import replay_steps

torch = pytest.importorskip("torch")
BATCH, WIDTH = 4096, 2048
BYTES = BATCH * WIDTH * 4


def make_step(before_freeing: str) -> Callable[[int], Callable[[], None]]:
    """A step that works on a batch of a copying stream, frees it, and has that stream copy the next ones."""

    def make(batch_size: int) -> Callable[[], None]:
        net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).to("cuda")
        side, host = torch.cuda.Stream(), torch.randn(batch_size, WIDTH).pin_memory()

        def fetch() -> torch.Tensor:
            with torch.cuda.stream(side):
                return host.to("cuda", non_blocking=True)

        def step() -> None:
            batch, main = fetch(), torch.cuda.current_stream()
            main.wait_stream(side)
            batch.record_stream(main)
            net(batch).sum().backward()
            if before_freeing == "the stream waits":
                side.wait_stream(main)
            elif before_freeing == "the host waits":
                torch.cuda.synchronize()
            del batch
            for _ in range(3):
                fetch()

        return step

    return make


@pytest.mark.parametrize("before_freeing", ["nobody waits", "the stream waits", "the host waits"])
def test_a_block_waits_for_the_stream_that_works_on_it(before_freeing: str) -> None:
    # given a step in which the device is behind the host when a batch is freed
    workload = capture_step(make_step(before_freeing), batch_size=BATCH, name="fetching", rebatch=False)
    # when its memory is replayed as predicted, and as if other streams were done at once
    memory = traincast.predict(workload, on="v100").memory
    at_once = replay_steps(replace(memory.events, late={}))
    # then the next batch cannot have its memory, unless somebody waited for the work
    if before_freeing == "nobody waits":
        assert list(memory.events.late) and memory.reserved_bytes == at_once.reserved + BYTES
        assert memory.active_bytes >= memory.allocated_bytes == at_once.allocated
    else:
        assert not memory.events.late and memory.reserved_bytes == at_once.reserved


def test_a_stream_without_kernels_is_not_waited_for() -> None:
    def make(batch_size: int) -> Callable[[], None]:
        side = torch.cuda.Stream()

        def step() -> None:
            block = torch.zeros(batch_size, WIDTH, device="cuda")
            with torch.cuda.stream(side):
                block.view(-1)  # an op that launches nothing
            del block
            torch.zeros(batch_size, WIDTH, device="cuda")

        return step

    workload = capture_step(make, batch_size=BATCH, name="viewing", rebatch=False)
    assert set(workload.programs[0].columns.op_stream.tolist()) > {0}
    assert not traincast.predict(workload, on="v100").memory.events.late
