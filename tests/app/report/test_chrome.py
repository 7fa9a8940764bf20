"""The Chrome trace of a prediction: slices inside the step, flows that connect, the critical path without gaps."""

from __future__ import annotations

import json

import pytest

import traincast
from traincast.app.report.chrome import make_chrome_trace


@pytest.fixture(scope="module")
def result():
    return traincast.predict("dlrm-default", on="v100", batch_size=512)


@pytest.fixture(scope="module")
def events(result):
    return make_chrome_trace(result)["traceEvents"]


def slices(events, process):
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process)
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid]


def test_it_is_plain_json(events):
    assert json.loads(json.dumps(events, allow_nan=False)) == events


def test_one_slice_per_kernel_and_per_scope(result, events):
    assert len(slices(events, "device")) == len(result.timeline.launches)
    assert len(slices(events, "host")) == result.timeline.program.num_scopes


def test_every_slice_lies_inside_the_step(result, events):
    length = 1e6 * result.iteration
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["ts"] + event["dur"] <= length + 0.01


def test_flows_start_on_the_host_and_end_on_the_device(events):
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for key, start in starts.items():
        assert start["ts"] <= ends[key]["ts"]


def test_the_critical_path_adds_up_to_the_step(result, events):
    total = sum(e["dur"] for e in slices(events, "critical path"))
    assert total == pytest.approx(1e6 * result.iteration, rel=1e-6)
