"""Timelines as instructions, worked out by hand; times are microseconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.traces.timelines import event, kernel, launch, linked, small_events, step
from traincast.simulator.many_ranks import Clocks, simulate_rank
from traincast.simulator.schedule import Code
from traincast.traces.replay.path import GRAPH, Labels, make_path_report
from traincast.traces.replay.steps import compute_exposed_communication, simulate_replay
from traincast.traces.replay.timeline import STEP_EDGE, make_timeline_instructions


def emitted(tied):
    """(code, host us, kernel us) of every instruction."""
    instructions = make_timeline_instructions(tied)
    seconds = zip(instructions.host_seconds.tolist(), instructions.kernel_seconds.tolist(), strict=True)
    return [
        (Code(code).name, round(1e6 * host), round(1e6 * device))
        for code, (host, device) in zip(instructions.schedule.code.tolist(), seconds, strict=True)
    ]


def test_gaps_launches_and_kernels_keep_their_lengths(tmp_path):
    tied = linked(tmp_path, small_events())

    assert emitted(tied) == [
        ("HOST", 0, 0), ("HOST", 0, 0),  # the step begins
        ("HOST", 120, 0), ("LAUNCH", 10, 400),
        ("HOST", 180, 0), ("LAUNCH", 10, 20),
        ("HOST", 280, 0), ("HOST", 5, 0),  # the device was done before: nothing to wait for
        ("HOST", 395, 0), ("HOST", 0, 0),
    ]  # fmt: skip


def test_instructions_say_which_call_they_lead_to(tmp_path):
    tied = linked(tmp_path, small_events())
    instructions = make_timeline_instructions(tied)

    names = ["" if point < 0 else tied.get_name(point) for point in instructions.point.tolist()]
    assert names == ["", "", *["cudaLaunchKernel"] * 4, "cudaDeviceSynchronize", "cudaDeviceSynchronize", "", ""]
    assert (instructions.row == STEP_EDGE).sum() == 2
    ways = instructions.gap_end >= 0
    assert (instructions.gap_end - instructions.gap_begin)[ways].tolist() == [0, 120_000, 180_000, 280_000, 395_000]


def test_a_synchronisation_holds_the_host_for_the_stream_it_can_have_waited_for(tmp_path):
    events = step(
        launch(1, 10), kernel(1, 20, 100, stream=7), launch(2, 30), kernel(2, 40, 300, stream=9),
        event("cuda_runtime", "cudaStreamSynchronize", 50, 75, correlation=3),
    )  # fmt: skip

    instructions = make_timeline_instructions(linked(tmp_path, events))

    (held,) = [i for i, code in enumerate(instructions.schedule.code) if code == Code.STREAM_SYNCHRONIZE]
    assert instructions.schedule.target[held] == 0  # stream 7: the other one ran on after the call had returned
    assert instructions.host_seconds[held + 1] == pytest.approx(5e-6)  # from the kernel's end to the call's


def test_a_device_synchronisation_waits_for_everything(tmp_path):
    events = step(
        launch(1, 10), kernel(1, 20, 100, stream=7), launch(2, 30), kernel(2, 40, 60, stream=9),
        event("cuda_runtime", "cudaDeviceSynchronize", 50, 75, correlation=3),
    )  # fmt: skip

    assert [code for code, _, _ in emitted(linked(tmp_path, events))].count("DEVICE_SYNCHRONIZE") == 1


def test_a_thread_that_was_silent_waited_for_the_one_that_worked(tmp_path):
    events = step(
        event("cpu_op", "aten::mm", 10, 30), launch(1, 20), kernel(1, 30, 5),
        event("cpu_op", "MmBackward0", 100, 100, tid=2), launch(2, 180, tid=2), kernel(2, 190, 5),
        event("cpu_op", "aten::add", 300, 30), launch(3, 310), kernel(3, 320, 5),
    )  # fmt: skip

    joins = [code for code, _, _ in emitted(linked(tmp_path, events))].count("JOIN")

    assert joins == 2  # backward waited for forward, and the main thread for backward


def test_a_copy_from_pageable_memory_holds_its_own_call(tmp_path):
    copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 20, 100, 7, correlation=1, stream=7, device=0)
    codes = emitted(linked(tmp_path, step(launch(1, 10, 115, name="cudaMemcpyAsync"), copy)))

    assert ("LAUNCH", 10, 100) in codes
    assert [code for code, _, _ in codes].count("STREAM_SYNCHRONIZE") == 1


def test_work_from_before_the_trace_keeps_its_stream_busy(tmp_path):
    events = step(kernel(99, 0, 300), launch(1, 10), kernel(1, 305, 50))
    tied = linked(tmp_path, events)

    instructions = make_timeline_instructions(tied)

    assert instructions.schedule.code[0] == Code.LAUNCH
    assert instructions.kernel_seconds[0] == pytest.approx(300e-6)
    assert instructions.point[0] == -1
    starts = simulate_replay(tied, instructions).kernel_start
    assert starts[1] == pytest.approx(305e-6)  # the usual gap between two kernels of this queue is 5 us
    assert instructions.gap == pytest.approx(5e-6)


def test_a_kernel_that_a_full_device_kept_out_waits_for_the_one_that_had_it(tmp_path):
    events = step(launch(1, 10), kernel(1, 20, 200, stream=7), launch(2, 30), kernel(2, 222, 50, stream=9))
    tied = linked(tmp_path, events)

    instructions = make_timeline_instructions(tied)

    assert instructions.kernel_seconds.max() == pytest.approx(200e-6)
    assert instructions.kept_seconds.max() == pytest.approx(2e-6)
    assert simulate_replay(tied, instructions).kernel_start[1] == pytest.approx(
        217e-6
    )  # 5 us earlier, as the one before it
    faster = replace(instructions, kernel_seconds=0.5 * instructions.kernel_seconds)
    assert simulate_replay(tied, faster).kernel_start[1] == pytest.approx(117e-6)


def test_a_graph_node_that_begins_late_is_kept_by_the_graph(tmp_path):
    events = step(
        launch(1, 10, 20, name="cudaGraphLaunch"), kernel(1, 40, 30), kernel(1, 75, 20), kernel(1, 395, 50),
        event("cuda_runtime", "cudaDeviceSynchronize", 60, 390, correlation=50),
    )  # fmt: skip
    tied = linked(tmp_path, events)

    instructions = make_timeline_instructions(tied)
    labels = Labels(tied, instructions)

    assert [what for what in labels.late if what] == [GRAPH]
    assert instructions.kept_seconds.max() == pytest.approx(295e-6)  # 300 us less the usual gap of 5
    assert instructions.kernel_seconds.sum() == pytest.approx(100e-6)
    assert simulate_replay(tied, instructions).steps[0].error == pytest.approx(0.0, abs=0.011)  # the first node's 10 us
    path = make_path_report(0, tied, instructions)
    assert next(iter(path.by_what)) == "host"
    assert path.faster[GRAPH] == pytest.approx(0.5 * 295 / 990, abs=1e-4)


def test_a_kernel_without_a_call_follows_the_one_before_it(tmp_path):
    events = step(launch(1, 10), kernel(1, 20, 100), kernel(77, 120, 40), kernel(78, 300, 40))
    tied = linked(tmp_path, events)

    instructions = make_timeline_instructions(tied)

    assert instructions.point[instructions.schedule.code == Code.LAUNCH].tolist() == [1, 1, 1]
    assert simulate_replay(tied, instructions).kernel_start == pytest.approx([15e-6, 115e-6, 295e-6])


def test_streams_of_two_devices_are_two(tmp_path):
    other = kernel(2, 40, 100)
    other["args"]["device"] = 1
    tied = linked(tmp_path, step(launch(1, 10), kernel(1, 20, 200), launch(2, 30), other))

    assert tied.stream[tied.device].tolist() == [0, 1]
    assert simulate_replay(tied, make_timeline_instructions(tied)).kernel_start == pytest.approx([15e-6, 35e-6])


def test_a_copy_that_waits_runs_and_holds_the_host(tmp_path):
    events = step(
        launch(1, 10), kernel(1, 20, 200),
        event("hip_runtime", "hipMemcpyWithStream", 30, 230, correlation=2),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 222, 30, tid=7, correlation=2, stream=7, device=0),
    )  # fmt: skip

    codes = emitted(linked(tmp_path, events))

    assert ("LAUNCH", 0, 30) in codes
    assert [code for code, _, _ in codes].count("STREAM_SYNCHRONIZE") == 1


def test_a_trace_without_markers_ends_with_its_device(tmp_path):
    tied = linked(tmp_path, [event("cpu_op", "aten::mm", 0, 30), launch(1, 10), kernel(1, 20, 500)])

    (simulated,) = simulate_replay(tied, make_timeline_instructions(tied)).steps

    assert simulated.number == 0
    assert simulated.measured == pytest.approx(520e-6)
    assert simulated.simulated == pytest.approx(520e-6)


def test_communication_is_exposed_where_nothing_else_runs(tmp_path):
    events = step(
        launch(1, 10), kernel(1, 15, 100, stream=20, name="ncclKernel_AllReduce"),
        launch(2, 50), kernel(2, 55, 30, stream=7),
    )  # fmt: skip
    tied = linked(tmp_path, events)
    instructions = make_timeline_instructions(tied)
    times = simulate_rank(
        instructions.schedule, instructions.host_seconds, instructions.kernel_seconds,
        Clocks.at_zero(instructions.schedule),
    )  # fmt: skip

    assert compute_exposed_communication(tied, instructions, times) == pytest.approx([70e-6])
