"""The overheads of an op with many launches, worked out by hand, in time that does not grow with their square."""

from __future__ import annotations

import pytest

from tests.effort import instructions
from tests.traces.timelines import event, kernel, launch, linked, step
from traincast.traces.overheads.extraction import ProfilerCost, measure_overheads

FREE = ProfilerCost(op=0.0, call=0.0)


def many_launches(count):
    """One op with `count` launches of 1 us, 2 us apart, each with a wait of 0.5 us and an inner op between them."""
    events = [event("cpu_op", "aten::many", 10, 2.0 * count + 20)]
    for number in range(count):
        at = 20 + 2 * number
        events += [
            launch(number + 1, at, 1), kernel(number + 1, at + 1, 1),
            event("cuda_runtime", "cudaStreamSynchronize", at + 1.25, 0.5),
            event("cpu_op", "aten::empty", at + 1.75, 0.1),
        ]  # fmt: skip
    return step(*events, length=10.0 * count + 100)


def totals(tmp_path, count, cost=FREE):
    table = measure_overheads(linked(tmp_path, many_launches(count)), cost).table
    return {kind: 1e6 * table[kind, "aten::many"].total for kind in ("T2", "T5", "T3")}


def test_waits_are_left_out_between_launches_and_after_the_last(tmp_path):
    us = totals(tmp_path, 3)

    assert us["T2"] == pytest.approx(10)
    assert us["T5"] == pytest.approx(2 * 0.5)
    assert us["T3"] == pytest.approx(36 - 25 - 0.5)


def test_recording_an_inner_op_is_taken_off_the_span_it_begins_in(tmp_path):
    us = totals(tmp_path, 3, ProfilerCost(op=200.0, call=0.0))

    assert us["T5"] == pytest.approx(2 * (0.5 - 0.2))


def test_an_op_with_many_launches_takes_no_quadratic_time(tmp_path):
    short, long = (linked(tmp_path, many_launches(count)) for count in (50, 800))
    few, many = (
        instructions(lambda timeline=timeline: measure_overheads(timeline, FREE)) for timeline in (short, long)
    )
    assert many < 32 * few, "16 times the launches; squared it would be 256 times"
