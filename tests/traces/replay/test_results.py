"""What an analysis of traces returns."""

from __future__ import annotations

import json

import pytest

import traincast
from tests.traces.timelines import rank_events, small_events, write_trace, write_two_ranks
from traincast.traces.replay.analysis import analyse_traces
from traincast.utils.errors import TraincastError

REPR = "TraceReport: rank 0 (small.json): 1 step, median 1.00 ms, device active 42%, replayed within 0.0%"


@pytest.fixture
def small(tmp_path):
    return write_trace(tmp_path / "small.json", small_events())


def test_a_step_as_plain_data(small):
    (rank,) = analyse_traces([small]).to_dict()["ranks"]
    (step,) = rank["steps"]

    assert step.pop("by_family_ms") == pytest.approx({"gemm": 0.4, "elementwise": 0.02})
    assert step.pop("by_op_ms") == pytest.approx({"aten::mm": 0.4, "aten::add": 0.02})
    assert step.pop("idle_evidence")["host_bound"] == "between ops"
    assert step == pytest.approx(
        {
            "number": 3, "iteration_ms": 1.0, "device_active_ms": 0.42, "communication_ms": 0.0, "eg_comm": 0.0,
            "kernels": 2, "compute_ms": 0.42, "exposed_comm_ms": 0.0, "host_bound_ms": 0.545, "synchronised_ms": 0.005,
            "event_wait_ms": 0.0, "graph_nodes_ms": 0.0, "launch_latency_ms": 0.03, "not_recorded_ms": 0.0,
            "idle_ms": 0.58, "replayed_ms": 1.0, "replay_error": 0.0,
        }
    )  # fmt: skip
    assert (rank["device"], rank["marked"], rank["notes"], rank["joined_ops"]) == ("", True, [], None)


def test_everything_is_plain_json(tmp_path):
    document = analyse_traces([write_two_ranks(tmp_path)]).to_dict()

    assert json.loads(json.dumps(document)) == document
    assert list(document) == ["ranks", "together"]


def test_a_single_rank_is_not_together_with_anybody(small):
    report = analyse_traces([small])

    assert report.together is None
    assert report.to_dict()["together"] is None


def test_ranks_together_as_plain_data(tmp_path):
    together = analyse_traces([write_two_ranks(tmp_path, clock=1000)]).to_dict()["together"]

    late, on_time = together["replay"]["ranks"]
    assert (late["waited_ms"], late["came_last"]) == (pytest.approx(0.3), 0)
    assert (on_time["waited_ms"], on_time["came_last"]) == (0.0, 1)
    assert on_time["clock_offset_us"] == pytest.approx(1000)
    (collective,) = together["replay"]["collectives"]
    assert collective == {
        "kind": "all_reduce", "group": "", "ranks": [0, 1], "message_bytes": 4096, "transfer_us": pytest.approx(50),
        "latency_us": pytest.approx([350, 50]),
    }  # fmt: skip
    assert together["prediction"] is None


def test_ranks_with_nothing_in_common_say_so(tmp_path):
    write_trace(tmp_path / "rank0.json", small_events())
    write_trace(tmp_path / "rank1.json", small_events())

    together = analyse_traces([tmp_path]).together

    assert together.replay is None
    assert together.path is None
    assert together.notes == ("the ranks cannot be replayed together: they have no collective in common",)


def test_a_short_repr_and_html(small):
    report = analyse_traces([small])

    assert repr(report) == REPR
    page = report._repr_html_()
    assert "steps (1 row)" in page
    assert "kernels (2 rows)" in page


def test_the_repr_of_a_prediction_names_its_platform(small):
    report = traincast.trace(small, on="v100", host="study-2022")

    assert repr(report).startswith(f"{REPR}, predicted on v100 with GMAE ")


def test_the_median_step_is_of_median_length(tmp_path):
    events, begin = [], 0
    for work in (400, 100, 200):
        step = rank_events(work)
        events += [{**e, "ts": e["ts"] + begin, "name": e["name"].replace("#3", f"#{work}")} for e in step]
        begin += 1000
    (rank,) = analyse_traces([write_trace(tmp_path / "three.json", events)]).ranks

    assert [step.number for step in rank.steps] == [400, 100, 200]
    assert rank.median_step.step == sorted(step.step for step in rank.steps)[1]


def test_records_have_a_row_for_every_kernel_and_overhead(small):
    tables = analyse_traces([small]).records()

    assert [row["name"] for row in tables["kernels"]] == ["volta_sgemm_128x64", "vectorized_elementwise_kernel"]
    assert tables["kernels"][0] == {
        "rank": 0, "step": 0, "stream": 7, "name": "volta_sgemm_128x64", "family": "gemm", "op": "aten::mm",
        "start_us": 150.0, "length_us": 400.0,
    }  # fmt: skip
    assert {(row["type"], row["op"]) for row in tables["overheads"]} >= {("T2", "aten::mm"), ("alone", "aten::view")}
    assert all(row["rank"] == 0 for rows in tables.values() for row in rows)
    assert tables["prediction"] == tables["together"] == []


def test_a_predicted_run_has_predicted_kernels_and_shares(small):
    tables = traincast.trace(small, on="v100", host="study-2022").records()

    assert all(row["predicted_us"] > 0 for row in tables["kernels"])
    (step,) = tables["prediction"]
    assert step["simulation"] + step["kernels"] + step["overheads"] == pytest.approx(step["error"])


def test_frames_leave_out_tables_without_rows(small):
    pytest.importorskip("polars")

    frames = analyse_traces([small]).frames()

    assert set(frames) == {
        "steps", "kernels", "overheads", "critical_path", "top_kernels", "rates", "launches", "streams", "queue_curve",
    }  # fmt: skip
    assert frames["steps"]["iteration_ms"].to_list() == pytest.approx([1.0])


def test_execution_traces_alone_are_refused(tmp_path):
    node = {"id": 1, "name": "aten::mm", "parent": 0}
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": [node]}))

    with pytest.raises(TraincastError, match="a measured step needs a Kineto trace too"):
        analyse_traces([path])
