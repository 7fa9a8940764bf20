"""Timelines as instructions, worked out by hand; times are microseconds."""

from __future__ import annotations

import pytest

from tests.traces.timelines import event, kernel, launch, linked, small_events, step
from traincast.replay.steps import exposed_communication, rewalk
from traincast.replay.timeline import STEP_EDGE, timeline_instructions
from traincast.walk.clocks import Clocks
from traincast.walk.one_rank import walk
from traincast.walk.schedule import Code


def emitted(tied):
    """(code, host us, kernel us) of every instruction."""
    instructions = timeline_instructions(tied)
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
    instructions = timeline_instructions(tied)

    names = ["" if point < 0 else tied.name(point) for point in instructions.point.tolist()]
    assert names == ["", "", *["cudaLaunchKernel"] * 4, "cudaDeviceSynchronize", "cudaDeviceSynchronize", "", ""]
    assert (instructions.row == STEP_EDGE).sum() == 2
    ways = instructions.gap_end >= 0
    assert (instructions.gap_end - instructions.gap_begin)[ways].tolist() == [0, 120_000, 180_000, 280_000, 395_000]


def test_a_synchronisation_holds_the_host_for_the_stream_it_can_have_waited_for(tmp_path):
    events = step(
        launch(1, 10), kernel(1, 20, 100, stream=7), launch(2, 30), kernel(2, 40, 300, stream=9),
        event("cuda_runtime", "cudaStreamSynchronize", 50, 75, correlation=3),
    )  # fmt: skip

    instructions = timeline_instructions(linked(tmp_path, events))

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

    instructions = timeline_instructions(tied)

    assert instructions.schedule.code[0] == Code.LAUNCH
    assert instructions.kernel_seconds[0] == pytest.approx(300e-6)
    assert instructions.point[0] == -1
    starts = rewalk(tied, instructions).kernel_start
    assert starts[1] == pytest.approx(300e-6)


def test_a_kernel_that_a_full_device_kept_out_takes_longer(tmp_path):
    events = step(launch(1, 10), kernel(1, 20, 200, stream=7), launch(2, 30), kernel(2, 220, 50, stream=9))
    tied = linked(tmp_path, events)

    instructions = timeline_instructions(tied)

    waited = 220 - 35  # from its launch having returned
    assert instructions.kernel_seconds.max() == pytest.approx((50 + waited) * 1e-6)


def test_a_trace_without_markers_ends_with_its_device(tmp_path):
    tied = linked(tmp_path, [event("cpu_op", "aten::mm", 0, 30), launch(1, 10), kernel(1, 20, 500)])

    (walked,) = rewalk(tied, timeline_instructions(tied)).steps

    assert walked.number == 0
    assert walked.measured == pytest.approx(520e-6)
    assert walked.walked == pytest.approx(520e-6)


def test_communication_is_exposed_where_nothing_else_runs(tmp_path):
    events = step(
        launch(1, 10), kernel(1, 15, 100, stream=20, name="ncclKernel_AllReduce"),
        launch(2, 50), kernel(2, 55, 30, stream=7),
    )  # fmt: skip
    tied = linked(tmp_path, events)
    instructions = timeline_instructions(tied)
    times = walk(
        instructions.schedule, instructions.host_seconds, instructions.kernel_seconds,
        Clocks.at_zero(instructions.schedule),
    )  # fmt: skip

    assert exposed_communication(tied, instructions, times) == pytest.approx([70e-6])
