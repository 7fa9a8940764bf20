"""Totals of a timeline."""

from __future__ import annotations

from tests.simulator.instructions import host, launch, run, schedule_of
from traincast.simulator.timeline import Timeline


def timeline_of(program):
    times, clocks = run(program)
    return Timeline(
        program=None,
        schedule=schedule_of(program),
        calls=(),
        times=times,
        origin=0.0,
        seconds=clocks.latest,
        host_busy=sum(i.host for i in program),
    )


def test_active_time_counts_overlapping_streams_once():
    timeline = timeline_of([launch(6, stream=0), launch(3, stream=1), host(10), launch(2, stream=1)])

    assert timeline.device_active() == 8


def test_active_time_of_a_step_without_kernels_is_zero():
    assert timeline_of([host(3)]).device_active() == 0


def test_a_kernel_inside_another_adds_nothing():
    timeline = timeline_of([launch(9, stream=0), launch(2, stream=1), launch(1, stream=1)])

    assert timeline.device_active() == 9
