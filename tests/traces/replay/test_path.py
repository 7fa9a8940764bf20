"""The critical path of a timeline and what faster parts of it would bring."""

from __future__ import annotations

import numpy as np
import pytest

from tests.traces.timelines import event, kernel, launch, linked, step, write_two_ranks
from traincast.simulator.timeline import PathPart, Segment
from traincast.traces.replay.analysis import analyse_traces
from traincast.traces.replay.path import BACKLOG, HOST, LATE, Labels, make_path_report, sort_by_gain
from traincast.traces.replay.timeline import make_timeline_instructions
from traincast.utils.errors import TraincastError


def waited_for():
    """A product of 300 us that the host waits for, in a step of 400 us."""
    return step(
        event("cpu_op", "aten::mm", 15, 35), launch(1, 20, 10), kernel(1, 30, 300, name="sgemm"),
        event("cuda_runtime", "cudaDeviceSynchronize", 60, 270, correlation=9), length=400,
    )  # fmt: skip


def report(tied, twice=()):
    return make_path_report(4, tied, make_timeline_instructions(tied), twice)


def test_the_path_goes_through_what_the_host_waited_for(tmp_path):
    path = report(linked(tmp_path, waited_for()))

    assert [(part.rank, part.what, part.name) for part in path.segments] == [
        (4, "host", "between ops"), (4, "host", "aten::mm"), (4, "gemm", "sgemm"), (4, "host", "between ops"),
    ]  # fmt: skip
    assert path.by_what == pytest.approx({"gemm": 0.75, "host": 0.25})
    assert path.by_op["aten::mm"] == pytest.approx((10 + 300) / 400)


def test_half_the_kernel_saves_half_of_what_was_waited(tmp_path):
    path = report(linked(tmp_path, waited_for()))

    assert path.faster["gemm"] == pytest.approx(150 / 400)


def test_what_was_asked_for_comes_first(tmp_path):
    path = report(linked(tmp_path, waited_for()), ["aten::mm"])

    assert next(iter(path.faster)) == "aten::mm"
    assert sort_by_gain({"a": 0.1, "b": 0.3, "c": 0.3}, ["a"], {"c": 0.5}) == {"a": 0.1, "c": 0.3, "b": 0.3}
    assert list(sort_by_gain({"a": 0.1, "b": 0.3, "c": 0.3}, [], {"c": 0.5})) == ["c", "b", "a"]


def test_a_name_that_the_trace_does_not_have_is_refused(tmp_path):
    with pytest.raises(TraincastError, match=r"aten::bmm.*Name one of the trace"):
        report(linked(tmp_path, waited_for()), ["aten::bmm"])


def test_the_plain_form_has_microseconds_and_no_rank(tmp_path):
    document = report(linked(tmp_path, waited_for())).to_dict()

    assert document["segments"][2] == {
        "what": "gemm", "op": "aten::mm", "name": "sgemm", "start_us": 30.0, "length_us": 300.0,
    }  # fmt: skip
    assert list(document) == [
        "share_by_what",
        "share_by_op",
        "twice_as_fast_saves",
        "steady_step_ms",
        "share_by_what_after",
        "critical_on_all_paths",
        "segments",
    ]


def test_what_the_next_step_waits_for_is_the_path_not_where_the_host_ends(tmp_path):
    marks = [event("user_annotation", f"ProfilerStep#{n}", 1000 * n, 1000) for n in (1, 2, 3)]
    events = [event("cuda_runtime", "cudaDeviceSynchronize", 1000 * n + 1, 99, correlation=90 + n) for n in (1, 2, 3)]
    for n in range(4):  # 20 us after the wait the device has all it needs, while the host goes on for 800 us
        at = 1000 * n + 100
        events += [launch(2 * n, at + 10, dur=10), kernel(2 * n, at + 20, 850, name="sgemm")]
        events += [event("cpu_op", "aten::mm", at, 900), launch(2 * n + 1, at + 790, dur=10)]
        events += [kernel(2 * n + 1, at + 870, 130, name="relu_kernel")]
    path = report(linked(tmp_path, [*marks, *events]))

    assert path.by_what["gemm"] == pytest.approx(0.85, abs=0.04)
    assert path.by_what["elementwise"] == pytest.approx(0.13, abs=0.04)
    assert path.faster["gemm"] > max(path.faster["host"], path.faster["elementwise"])


def test_labels_name_families_ops_and_the_backlog(tmp_path):
    tied = linked(tmp_path, [*waited_for(), kernel(77, 0, 20, name="reduce_kernel")])
    labels = Labels(tied, make_timeline_instructions(tied))

    assert labels.families == ["gemm"]
    assert labels.ops == ["aten::mm"]
    parts = list(labels.describe_segment(4, Segment("device", 0, 0.0, 20e-6)))
    assert parts == [PathPart(4, BACKLOG, BACKLOG, "reduce_kernel", 0.0, 20e-6)]


def test_a_kernel_that_began_late_is_two_parts_of_the_path(tmp_path):
    tied = linked(tmp_path, step(launch(1, 10), kernel(1, 55, 100)))
    instructions = make_timeline_instructions(tied)
    (place,) = np.flatnonzero(instructions.kept_seconds)

    late, running = Labels(tied, instructions).describe_segment(0, Segment("device", int(place), 15e-6, 155e-6))

    assert (late.what, late.start, late.end) == (LATE, 15e-6, pytest.approx(55e-6))
    assert (running.what, running.start, running.end) == ("gemm", late.end, 155e-6)


def test_half_the_time_for_the_host_leaves_kernels_alone(tmp_path):
    tied = linked(tmp_path, waited_for())
    instructions = make_timeline_instructions(tied)

    halved = Labels(tied, instructions).halve_time(HOST)

    assert halved.host_seconds.tolist() == pytest.approx((0.5 * instructions.host_seconds).tolist())
    assert halved.kernel_seconds.tolist() == instructions.kernel_seconds.tolist()


def test_half_the_time_for_an_op_is_half_of_its_kernels_and_of_its_host_time(tmp_path):
    tied = linked(tmp_path, waited_for())
    instructions = make_timeline_instructions(tied)

    halved = Labels(tied, instructions).halve_time("aten::mm")

    assert instructions.kernel_seconds.sum() - halved.kernel_seconds.sum() == pytest.approx(150e-6)
    # 5 us before the launch, 10 us of the launch and 20 us after it are inside of the op
    assert instructions.host_seconds.sum() - halved.host_seconds.sum() == pytest.approx(0.5 * 35e-6)


def test_over_ranks_the_path_goes_to_the_one_that_came_last(tmp_path):
    path = analyse_traces([write_two_ranks(tmp_path)]).together.path

    assert [(part.rank, part.what) for part in path.segments][:3] == [(1, "host"), (1, "host"), (1, "communication")]
    assert sum(path.by_rank.values()) == pytest.approx(1.0)
    assert path.faster["rank 0"] == pytest.approx(0.0)  # rank 0 only waits
    assert path.faster["communication"] == pytest.approx(25 / 485)


def test_with_two_paths_the_order_is_that_of_the_gains(tmp_path):
    """The host works for 500 us and a kernel that it waits for runs for 450 from the begin: half the host saves the
    50 us down to that."""
    events = step(
        launch(1, 0, dur=10), kernel(1, 10, 450), event("cpu_op", "aten::mm", 20, 480),
        event("cuda_runtime", "cudaDeviceSynchronize", 500, 5, correlation=9), launch(2, 505, dur=5),
        kernel(2, 510, 100, name="relu_kernel"), event("cuda_runtime", "cudaDeviceSynchronize", 512, 98, correlation=8),
        length=612,
    )  # fmt: skip
    path = report(linked(tmp_path, events))

    assert path.most == "host"
    assert next(iter(path.critical)) == next(iter(path.by_what)) == max(path.critical, key=path.critical.__getitem__)
    assert all(path.critical[what] == pytest.approx(2 * path.faster[what]) for what in path.critical)
    assert path.after
