"""The critical path on schedules worked out by hand, and what must hold for all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.instructions import host, join, launch, rank_group_of, record, sync_device, wait
from tests.simulator.test_walk_properties import programs
from traincast.simulator.many_ranks import Collectives, simulate_ranks
from traincast.simulator.timeline import find_critical_path


def simulated(program, gap=0.0):
    return simulate_ranks([rank_group_of(program)], Collectives.none(), gap=gap)


def path(program):
    return [(s.where, s.instruction, s.start, s.end) for s in find_critical_path(simulated(program))]


def test_host_bound_step_is_all_host():
    assert path([host(3), launch(1, call=1), host(5)]) == [("host", 0, 0, 3), ("host", 1, 3, 4), ("host", 2, 4, 9)]


def test_device_bound_step_follows_the_stream():
    assert path([launch(5, call=1), launch(5, call=1)]) == [
        ("host", 0, 0, 1),
        ("device", 0, 1, 6),
        ("device", 1, 6, 11),
    ]


def test_late_launch_brings_the_path_back_to_the_host():
    assert path([launch(2, call=1), host(9), launch(4, call=1)]) == [
        ("host", 0, 0, 1),
        ("host", 1, 1, 10),
        ("host", 2, 10, 11),
        ("device", 2, 11, 15),
    ]


def test_event_wait_crosses_streams():
    assert path([launch(6, stream=0), record(0, 0), wait(0, 1), launch(3, stream=1)]) == [
        ("device", 0, 0, 6),
        ("device", 3, 6, 9),
    ]


def test_synchronisation_puts_the_kernel_on_the_host_path():
    assert path([launch(7), sync_device(), host(2)]) == [("device", 0, 0, 7), ("host", 2, 7, 9)]


def test_join_crosses_threads():
    assert path([host(5, thread=0), join(1, 0), host(2, thread=1)]) == [("host", 0, 0, 5), ("host", 2, 5, 7)]


@given(programs, st.sampled_from([0.0, 2.0]))
@settings(max_examples=300, deadline=None)
def test_the_path_has_no_hole_and_spans_the_step(program, gap):
    simulations = simulated(program, gap)

    segments = find_critical_path(simulations)

    assert sum(s.seconds for s in segments) == simulations[0].latest()[0]
    for before, after in zip(segments, segments[1:], strict=False):
        assert before.end == after.start
