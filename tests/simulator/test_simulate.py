"""The simulation against cases worked out by hand. Times are in whole seconds so that they can be read off."""

from __future__ import annotations

import pytest

from tests.simulator.instructions import (
    host,
    join,
    launch,
    record,
    run,
    sync_device,
    sync_event,
    sync_stream,
    wait,
)

CASES = {
    "nothing at all": ([host(0)], [], 0),
    "host work only": ([host(2), host(3)], [], 5),
    "one kernel starts when its launch returns": ([launch(4, call=1)], [(1, 5)], 5),
    "host-bound: the device waits for each launch": (
        [host(3), launch(1, call=1), host(3), launch(1, call=1)],
        [(4, 5), (8, 9)],
        9,
    ),
    "device-bound: kernels queue up": (
        [launch(5, call=1), launch(5, call=1), launch(5, call=1)],
        [(1, 6), (6, 11), (11, 16)],
        16,
    ),
    "device catches up with a slow host": (
        [launch(4, call=1), host(10), launch(2, call=1)],
        [(1, 5), (12, 14)],
        14,
    ),
    "host work after the last launch ends the step": ([launch(2, call=1), host(9)], [(1, 3)], 10),
    "two streams overlap": (
        [launch(6, stream=0, call=1), launch(3, stream=1, call=1)],
        [(1, 7), (2, 5)],
        7,
    ),
    "two streams keep their own order": (
        [launch(6, stream=0), launch(3, stream=1), launch(2, stream=1), launch(1, stream=0)],
        [(0, 6), (0, 3), (3, 5), (6, 7)],
        7,
    ),
    "a stream waits for an event of another": (
        [launch(6, stream=0), record(0, 0), wait(0, 1), launch(3, stream=1)],
        [(0, 6), (6, 9)],
        9,
    ),
    "work before the wait is not held back": (
        [launch(6, stream=0), record(0, 0), launch(2, stream=1), wait(0, 1), launch(3, stream=1)],
        [(0, 6), (0, 2), (6, 9)],
        9,
    ),
    "an event covers only what was launched before it": (
        [launch(2, stream=0), record(0, 0), launch(8, stream=0), wait(0, 1), launch(1, stream=1)],
        [(0, 2), (2, 10), (2, 3)],
        10,
    ),
    "a wait for an event nobody recorded holds nothing": (
        [launch(5, stream=0), wait(0, 1), launch(1, stream=1)],
        [(0, 5), (0, 1)],
        5,
    ),
    "an event on an idle stream happens when it is recorded": (
        [host(4), record(0, 0), wait(0, 1), launch(1, stream=1)],
        [(4, 5)],
        5,
    ),
    "a device synchronise holds the host": (
        [launch(7, call=1), sync_device(), launch(1, call=1)],
        [(1, 8), (9, 10)],
        10,
    ),
    "a device synchronise waits for every stream": (
        [launch(3, stream=0), launch(9, stream=1), sync_device(), launch(1, stream=0, call=1)],
        [(0, 3), (0, 9), (10, 11)],
        11,
    ),
    "a stream synchronise waits for its stream only": (
        [launch(3, stream=0), launch(9, stream=1), sync_stream(0), launch(1, stream=0, call=1)],
        [(0, 3), (0, 9), (4, 5)],
        9,
    ),
    "a synchronise with an idle device costs nothing": ([host(5), sync_device(), host(1)], [], 6),
    "an event synchronise holds the host until the event": (
        [launch(2), record(0, 0), launch(9), sync_event(0), host(1), launch(1, stream=1)],
        [(0, 2), (2, 11), (3, 4)],
        11,
    ),
    "a re-recorded event means the later record": (
        [launch(2), record(0, 0), launch(5), record(0, 0), wait(0, 1), launch(1, stream=1)],
        [(0, 2), (2, 7), (7, 8)],
        8,
    ),
    "threads run side by side": ([host(5, thread=0), host(3, thread=1), launch(1, thread=1)], [(3, 4)], 5),
    "a join waits for the other thread": (
        [host(5, thread=0), join(1, 0), host(2, thread=1), launch(1, thread=1, call=1)],
        [(8, 9)],
        9,
    ),
    "backward on its own thread hands back to the main one": (
        [host(2), join(1, 0), host(3, thread=1), launch(9, thread=1), join(0, 1), host(4), launch(1)],
        [(5, 14), (14, 15)],
        15,
    ),
    "two threads share a stream in launch order": (
        [launch(4, thread=0, call=1), host(9, thread=1), launch(2, thread=1, call=1), launch(1, thread=0)],
        [(1, 5), (10, 12), (12, 13)],
        13,
    ),
    "sync, bubble, and a queue again": (
        [launch(3), launch(3), sync_stream(0), host(2), launch(1), launch(1)],
        [(0, 3), (3, 6), (8, 9), (9, 10)],
        10,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_walk_by_hand(name):
    program, kernels, length = CASES[name]

    trace, clocks = run(program)

    assert list(zip(trace.kernel_start.tolist(), trace.kernel_end.tolist(), strict=True)) == kernels
    assert clocks.latest == length


def test_time_held_by_a_synchronisation_is_visible():
    trace, _ = run([launch(7), sync_device()])

    assert (trace.host_after - trace.host_issue).tolist() == [0, 7]


def test_queued_kernels_follow_each_other_after_a_gap():
    trace, clocks = run([launch(5, call=1), launch(5, call=1), launch(5, stream=1), host(30), launch(2)], gap=2)

    assert trace.kernel_start.tolist() == [1, 8, 2, 32]
    assert clocks.latest == 34
