"""Steps by other marks than the profiler's; times are microseconds."""

from __future__ import annotations

import json

import pytest

from tests.traces.timelines import event, kernel, launch
from traincast.traces.breakdown import compute_breakdown
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.utils.errors import TraincastError


def run(tmp_path, *events, marker=""):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0, 5), *events]}))
    return link_trace(read_kineto(path), marker)


def loop(name, *starts):
    return loop_of(name, 20, *starts)


def loop_of(name, length, *starts):
    return [event("user_annotation", name, start, length) for start in starts]


def test_steps_begin_at_an_optimizer_where_the_profiler_marked_none(tmp_path):
    tied = run(tmp_path, *loop("Optimizer.step#SGD.step", 100, 300, 600), *loop("Optimizer.step#Adam.step", 150, 350))

    assert tied.marked
    assert [(step.number, step.start, step.end) for step in tied.steps] == [
        (0, 100_000, 300_000),
        (1, 300_000, 600_000),
    ]


def test_one_step_of_an_optimizer_marks_nothing(tmp_path):
    assert not run(tmp_path, *loop("Optimizer.step#SGD.step", 100)).marked


def test_a_marker_of_ones_own(tmp_path):
    tied = run(tmp_path, *loop("my loop", 100, 150), *loop("ProfilerStep#4", 0, 200), marker="my loop")

    assert [step.seconds for step in tied.steps] == pytest.approx([50e-6])


def test_steps_begin_at_annotations_that_call_themselves_steps(tmp_path):
    starts = (100, 300, 500, 700)
    work = [launch(number, start + 10) for number, start in enumerate(starts)]
    serving = [
        event("user_annotation", f"execute_context_{n}({7 * n})_generation_8(8)", start, 150)
        for n, start in enumerate(starts)
    ]
    inner = [event("user_annotation", f"layer step {n % 2}", start + 5, 20) for n, start in enumerate(starts)]

    tied = run(tmp_path, *work, *serving, *inner)

    assert [(step.start, step.end) for step in tied.steps] == [
        (100_000, 300_000),
        (300_000, 500_000),
        (500_000, 700_000),
    ]
    assert tied.marker == "execute_context_#(#)_generation_#(#)"


@pytest.mark.parametrize(
    ("name", "length", "outside"),
    [("layer", 150, ()), ("step", 20, ()), ("step", 150, (launch(90, 5), launch(91, 40)))],
)
def test_other_annotations_are_no_steps(tmp_path, name, length, outside):
    starts = (100, 300, 500, 700)
    work = [launch(number, start + 10) for number, start in enumerate(starts)]

    tied = run(tmp_path, *work, *outside, *loop_of(name, length, *starts))

    assert not tied.marked
    assert tied.marker == ""


def test_a_marker_may_stand_for_several_names(tmp_path):
    ranges = [event("user_annotation", f"prefill {n}", 100 * n, 50) for n in (1, 2, 4)]

    tied = run(tmp_path, *ranges, marker="prefill *")

    assert [step.seconds for step in tied.steps] == pytest.approx([100e-6, 200e-6])


def test_a_marker_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(TraincastError, match=r"step marker 'other'.*at least twice"):
        run(tmp_path, *loop("my loop", 100, 150), marker="other")


def test_idle_time_is_the_synchronisation_only_while_it_lasts(tmp_path):
    tied = run(
        tmp_path, event("user_annotation", "ProfilerStep#1", 0, 1000), launch(1, 10), kernel(1, 20, 80),
        event("cuda_runtime", "cudaStreamSynchronize", 95, 10, correlation=9), event("cpu_op", "aten::add", 700, 20),
        launch(2, 705), kernel(2, 712, 288),
    )  # fmt: skip

    (step,) = compute_breakdown(tied)

    assert step.synchronised == pytest.approx(5e-6)  # from the kernel's end to the call's
    assert step.host_bound == pytest.approx(15e-6 + 610e-6 - 5e-6)
    assert step.launch_latency == pytest.approx(5e-6 + 2e-6)
    assert step.host_bound + step.synchronised + step.launch_latency == pytest.approx(step.idle)
    assert step.describe_evidence("host_bound") == "while the host is between ops"


def test_idle_time_is_named_by_what_the_host_did_not_by_the_op_that_ended_it(tmp_path):
    tied = run(
        tmp_path, event("user_annotation", "ProfilerStep#1", 0, 1000), launch(1, 10), kernel(1, 20, 80),
        event("user_annotation", "enumerate(DataLoader)#next", 100, 590), event("cpu_op", "aten::to", 700, 20),
        launch(2, 705), kernel(2, 712, 288),
    )  # fmt: skip

    (step,) = compute_breakdown(tied)

    assert step.describe_evidence("host_bound") == "while the host is in enumerate(DataLoader)#next"


def test_graph_nodes_are_the_reason_where_they_are(tmp_path):
    tied = run(
        tmp_path, event("user_annotation", "ProfilerStep#1", 0, 1000), launch(1, 0, name="cudaGraphLaunch"),
        kernel(1, 2, 98), kernel(1, 600, 400, name="late_node"),
    )  # fmt: skip

    (step,) = compute_breakdown(tied)

    assert step.graph_nodes == pytest.approx(500e-6)
    assert step.evidence["graph_nodes"] == "late_node"


def test_what_the_profiler_puts_on_devices_for_an_optimizer_marks_nothing_beside_the_hosts(tmp_path):
    host, device = loop("Optimizer.step#SGD.step", 100, 300, 600), loop("Optimizer.step#SGD.step", 150, 350, 650)
    tied = run(tmp_path, *host, *({**mark, "cat": "gpu_user_annotation", "pid": 0} for mark in device))

    assert [step.start for step in tied.steps] == [100_000, 300_000]
