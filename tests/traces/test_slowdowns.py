"""How full the queue of launches was, and which calls it held; times are microseconds."""

from __future__ import annotations

from tests.traces.replay.simulated import Call, Run
from tests.traces.timelines import kernel, launch, linked, step
from traincast.traces.slowdowns import launch_queue


def device_bound(depth, *, first, count, times=40):
    calls = tuple(Call(4.0, ((name, 60.0),)) for name in ("gemm", "relu")) * times
    return Run(calls, depth=depth).trace(first, count)


def test_calls_count_the_calls_of_their_stream_that_are_not_done(tmp_path):
    tied = linked(tmp_path, step(
        launch(1, 10), kernel(1, 20, 300), launch(2, 30), kernel(2, 320, 50),
        launch(3, 40), kernel(3, 50, 10, stream=9), launch(4, 330), kernel(4, 370, 10),
    ))  # fmt: skip

    queue = launch_queue(tied)

    calls = [row for row in range(len(tied.events)) if tied.is_launch[row]]
    assert queue.waiting[calls].tolist() == [0, 1, 0, 1]
    assert queue.depth == {}
    assert not queue.held.any()


def test_a_full_queue_is_seen_and_its_calls_are_released_by_the_kernel_that_made_room(tmp_path):
    tied = linked(tmp_path, device_bound(300, first=10, count=4))

    queue = launch_queue(tied)

    assert queue.depth == {0: 299}  # when a call returns, the one that made room for it is done
    assert queue.held.sum() > 0.95 * tied.is_launch.sum()
    for call in queue.held.nonzero()[0].tolist():
        assert tied.end[call] - tied.end[queue.released_by[call]] == 4_000
    assert queue.usual <= 10_000


def test_a_queue_that_only_grows_holds_nobody(tmp_path):
    tied = linked(tmp_path, device_bound(5_000, first=0, count=8))

    queue = launch_queue(tied)

    assert queue.waiting.max() > 500
    assert queue.depth == {}
    assert queue.usual == 4_000


def test_a_short_queue_is_none(tmp_path):
    assert launch_queue(linked(tmp_path, device_bound(20, first=3, count=4))).depth == {}


def test_a_trace_without_kernels_has_no_queue(tmp_path):
    queue = launch_queue(linked(tmp_path, step(launch(1, 10))))

    assert queue.depth == {}
    assert queue.waiting.max() == 0
