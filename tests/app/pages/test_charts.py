"""Tracks and paths from Chrome traces, in columns."""

from __future__ import annotations

import pytest

from traincast.app.pages import charts
from traincast.app.pages.charts import make_timeline_data


def process(pid, name):
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def thread(pid, tid, name):
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def slice_(pid, name, ts, dur, tid=0, cat="gemm", **args):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


TWO = [
    process(1, "host"), thread(1, 0, "thread 0"), process(2, "device"), thread(2, 7, "stream 7"),
    process(0, "critical path"),
    slice_(1, "aten::mm", 5.0, 10.0, cat="forward"),
    slice_(2, "gemm: mm", 17.0, 3.0, tid=7, op="aten::mm"), slice_(2, "gemm: mm", 25.0, 2.5, tid=7, op="aten::mm"),
    slice_(0, "host: aten::mm", 5.0, 10.0, cat="critical", rank=0),
    slice_(0, "gemm: mm", 17.0, 3.0, cat="critical", rank=0),
    {"ph": "s", "pid": 1, "tid": 0, "ts": 6.0, "id": 1, "name": "launch", "cat": "launch"},
]  # fmt: skip


def test_slices_are_columns_of_nanoseconds_from_the_first():
    data = make_timeline_data({"traceEvents": TWO})

    host, device = data["tracks"]
    assert [track["title"] for track in data["tracks"]] == ["host, thread 0", "device, stream 7"]
    assert (host["start"], host["length"]) == ([0], [10_000])
    assert (device["start"], device["length"]) == ([12_000, 8_000], [3_000, 2_500])  # differences
    assert [data["names"][n] for n in device["name"]] == ["gemm: mm", "gemm: mm"]
    assert [data["names"][n] for n in device["detail"]] == ["op aten::mm", "op aten::mm"]
    assert [data["kinds"][k] for k in (host["kind"][0], device["kind"][0])] == ["host", "gemm"]
    assert data["end"] == 22_500
    assert data["left_out"] == 0


def test_the_path_lies_on_the_tracks_that_ran_then():
    data = make_timeline_data({"traceEvents": TWO})

    assert [(track, start, length, data["names"][name]) for track, start, length, name in data["path"]] == [
        (0, 0, 10_000, "host: aten::mm"), (1, 12_000, 3_000, "gemm: mm"),
    ]  # fmt: skip


def test_on_several_ranks_the_path_goes_to_the_rank_it_names():
    events = [
        process(1, "rank 0 and 2 like it: device"), process(2, "rank 3: device"), process(0, "critical path"),
        slice_(1, "a", 0.0, 5.0), slice_(2, "b", 0.0, 9.0),
        slice_(0, "rank 3: b", 0.0, 9.0, cat="critical", rank=3),
        slice_(0, "rank 0: a", 0.0, 5.0, cat="critical", rank=0),
    ]  # fmt: skip

    data = make_timeline_data({"traceEvents": events})

    assert [part[0] for part in data["path"]] == [1, 0]
    assert [data["names"][part[3]] for part in data["path"]] == ["b", "a"]


def test_measured_and_predicted_streams_stand_one_under_the_other():
    events = [
        process(0, "rank 0: host, measured"), process(1, "rank 0: device, measured"),
        process(2, "rank 0: device, replayed"), process(3, "rank 0: device, predicted"),
        slice_(0, "op", 0, 1, cat="op"),
        *(slice_(pid, "ampere_sgemm", 0, 1, tid=stream, cat="kernel") for pid in (1, 2, 3) for stream in (7, 20)),
    ]  # fmt: skip

    data = make_timeline_data({"traceEvents": events}, skipped=("replayed",))

    assert [track["title"] for track in data["tracks"]] == [
        "host, 0, measured", "device, 7, measured", "device, 7, predicted", "device, 20, measured",
        "device, 20, predicted",
    ]  # fmt: skip
    assert data["kinds"] == ["host", "gemm"]  # measured kernels are told by their names


def test_of_too_many_slices_the_shortest_are_left_out(monkeypatch):
    monkeypatch.setattr(charts, "MOST_SLICES", 3)
    events = [process(1, "device"), *(slice_(1, "k", 10.0 * n, 1.0 + n) for n in range(5))]

    data = make_timeline_data({"traceEvents": events})

    assert data["tracks"][0]["length"] == [3000, 4000, 5000]
    assert data["left_out"] == 2


@pytest.mark.parametrize("events", [[], [process(1, "host")]])
def test_a_trace_without_slices_is_an_empty_timeline(events):
    data = make_timeline_data({"traceEvents": events})

    assert (data["tracks"], data["path"], data["end"]) == ([], [], 0)


def test_a_step_of_many_is_as_long_as_its_period_and_wraps_its_neighbours():
    # the host runs 20 us ahead of the device; the step is 12 us long
    events = [
        process(1, "host"), process(2, "device"), process(0, "critical path"),
        slice_(1, "op", 0.0, 5.0), slice_(2, "kernel", 20.0, 12.0), slice_(2, "early", 15.0, 2.0),
        slice_(0, "kernel", 20.0, 12.0, cat="critical"),
    ]  # fmt: skip

    data = make_timeline_data({"traceEvents": events}, period=12e-6)

    assert data["end"] == 12_000
    host, device = data["tracks"]
    assert (host["start"], host["length"]) == ([4_000], [5_000])  # 24 us later: the step after the next
    assert (device["start"], device["length"]) == ([0, 7_000], [12_000, 2_000])
    assert "step the next" in data["names"][host["detail"][0]]


def test_a_slice_over_the_end_is_drawn_in_two_parts():
    events = [process(1, "device"), slice_(1, "long", 8.0, 6.0), process(0, "critical path"),
              slice_(0, "long", 0.0, 10.0, cat="critical")]  # fmt: skip

    (track,) = make_timeline_data({"traceEvents": events}, period=10e-6)["tracks"]

    assert (track["start"], track["length"]) == ([0, 8_000], [4_000, 2_000])


def test_of_many_ranks_those_on_the_path_are_open():
    events = [process(0, "critical path"), slice_(0, "rank 3: k", 0.0, 9.0, cat="critical", rank=3)]
    for rank in range(5):
        events += [process(rank + 1, f"rank {rank}: device"), slice_(rank + 1, "k", 0.0, 9.0)]

    data = make_timeline_data({"traceEvents": events})

    assert [track["title"] for track in data["tracks"] if not track["folded"]] == [
        "rank 0, device, 0", "rank 3, device, 0",
    ]  # fmt: skip
