"""Measured timelines for Perfetto."""

from __future__ import annotations

import pytest

from tests.traces.timelines import small_events, write_trace, write_two_ranks
from traincast.app.report.measured_chrome import make_measured_chrome_trace
from traincast.hardware.platform import load_platform
from traincast.traces.replay.analysis import TraceOptions, analyse_traces


def processes(document):
    named = [event for event in document["traceEvents"] if event["name"] == "process_name"]
    return {event["pid"]: event["args"]["name"] for event in named}


def slices(document, pid):
    return [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]


@pytest.fixture
def small(tmp_path):
    return write_trace(tmp_path / "small.json", small_events())


def test_a_rank_has_a_track_for_each_view(small):
    document = make_measured_chrome_trace(analyse_traces([small]))

    assert processes(document) == {
        0: "rank 0: host, measured",
        1: "rank 0: device, measured",
        2: "rank 0: device, replayed",
        3: "rank 0: critical path",
    }
    assert document["displayTimeUnit"] == "ms"


def test_kernels_stand_where_they_were_measured(small):
    document = make_measured_chrome_trace(analyse_traces([small]))

    measured = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in slices(document, 1)]
    assert measured == [("volta_sgemm_128x64", 7, 150.0, 400.0), ("vectorized_elementwise_kernel", 7, 560.0, 20.0)]


def test_an_arrow_goes_from_every_launch_to_its_kernel(small):
    events = make_measured_chrome_trace(analyse_traces([small]))["traceEvents"]

    begin = {e["id"]: (e["pid"], e["ts"]) for e in events if e["ph"] == "s"}
    end = {e["id"]: (e["pid"], e["ts"]) for e in events if e["ph"] == "f"}
    assert list(begin.values()) == [(0, 120.0), (0, 310.0)]
    assert list(end.values()) == [(1, 150.0), (1, 560.0)]
    assert begin.keys() == end.keys()


def test_the_host_shows_its_steps_and_top_level_ops(small):
    document = make_measured_chrome_trace(analyse_traces([small]))

    assert [(e["name"], e["cat"]) for e in slices(document, 0)] == [
        ("step 3", "step"), ("aten::mm", "op"), ("aten::view", "op"), ("aten::add", "op"),
    ]  # fmt: skip


def test_a_predicted_run_has_one_track_more(small):
    report = analyse_traces([small], TraceOptions(platform=load_platform("v100"), host="study-2022"))

    document = make_measured_chrome_trace(report)

    assert processes(document)[3] == "rank 0: device, predicted"
    assert len(slices(document, 3)) == 2


def test_ranks_share_a_clock_and_the_late_one_points_at_those_that_waited(tmp_path):
    document = make_measured_chrome_trace(analyse_traces([write_two_ranks(tmp_path, clock=5_000_000)]))

    (start,) = [e for e in document["traceEvents"] if e["ph"] == "s" and e["cat"] == "collective"]
    (finish,) = [e for e in document["traceEvents"] if e["ph"] == "f" and e["cat"] == "collective"]
    assert start["pid"] == 6  # rank 1's measured device: it came last ...
    assert finish["pid"] == 1  # ... and rank 0 had waited for it
    assert start["ts"] == finish["ts"] == 420.0
    assert processes(document)[10] == "critical path over ranks"
