"""CUDA graphs: a real run, told as if it had been captured and launched as a graph, belongs to the same ops."""

from __future__ import annotations

import gzip
import json

import pytest

from traincast.hardware.platform import load_platform
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.replay.analysis import TraceOptions, analyse_traces
from traincast.traces.replay.workload import trace_workload
from traincast.utils.errors import TraincastError

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


@pytest.fixture(scope="module")
def eager(shared_data):
    """Three steps of a Transformer on H100, small and on one stream."""
    path = shared_data / "traces" / "public_mixed" / "transformer_h100_1.json.gz"
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    return path


def split_graph(eager, replays=2, numbered=True):
    """The second step as a capture, and a run that launches it `replays` times: each kernel keeps its time, and is a
    node of the graph."""
    document = json.loads(gzip.decompress(eager.read_bytes()))
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    mark = next(e for e in events if e["name"] == "ProfilerStep#2")
    begin, end = mark["ts"], mark["ts"] + mark["dur"]
    thread = {"pid": mark["pid"], "tid": mark["tid"], "ph": "X", "cat": "cuda_runtime"}
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in _CALLS and "correlation" in e["args"]}
    inside = [e for e in events if e.get("cat") in ("cpu_op", *_CALLS) and begin < e["ts"] < end]
    kernels = [e for e in events if e.get("cat") in _ON_DEVICE and begin < calls[e["args"]["correlation"]]["ts"] < end]
    kernels.sort(key=lambda e: calls[e["args"]["correlation"]]["ts"])
    launches = [e["args"]["correlation"] for e in kernels]
    inside = [e for e in inside if "Launch" not in e["name"] or e["args"].get("correlation") in launches]
    capture = [
        {**thread, "name": "cudaStreamBeginCapture", "ts": begin + 0.1, "dur": 0.1, "args": {}}, *inside,
        {**thread, "name": "cudaStreamEndCapture", "ts": end, "dur": 1, "args": {}},
    ]  # fmt: skip
    graph, length = [], 10_000
    for replay in range(replays):
        shift = replay * length
        graph.append({**thread, "cat": "user_annotation", "name": f"ProfilerStep#{replay}", "ts": shift, "dur": length})
        call = {"correlation": 7_000_000 + replay}
        graph.append({**thread, "name": "cudaGraphLaunch", "ts": shift + 5, "dur": 50, "args": call})
        at = shift + 60
        for number, kernel in enumerate(kernels):
            node = {"graph id": 3, "graph node id": number} if numbered else {}
            graph.append({**kernel, "ts": at, "args": {**kernel["args"], **call, **node}})
            at += kernel["dur"] + 1
    return {**document, "traceEvents": capture}, {**document, "traceEvents": graph}


def write(path, document):
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("numbered", [True, False])
def test_nodes_of_a_graph_belong_to_the_ops_that_were_captured(eager, tmp_path, numbered):
    whole = analyse_traces([eager]).ranks[0].steps[1]
    capture, graph = split_graph(eager, numbered=numbered)
    replay = write(tmp_path / "replay.json", graph)

    (alone,) = analyse_traces([replay]).ranks
    (rank,) = analyse_traces([replay, write(tmp_path / "capture.json", capture)]).ranks

    assert set(alone.steps[0].by_op) == {"(no op)"}
    assert any("whose ops are not in the trace; give the trace of their capture" in note for note in alone.notes)
    for step in rank.steps:
        assert step.by_op == pytest.approx({op: s for op, s in whole.by_op.items() if op != "(no op)"}, rel=1e-6)
        assert step.step == pytest.approx(alone.steps[0].step)
    assert any("their captures tell the ops of 100% of it" in note for note in rank.notes)
    assert rank.overheads.table.keys() == alone.overheads.table.keys(), "what only captured is no host time of the run"


def test_captured_ops_are_predicted_in_every_launch_of_the_graph(eager, tmp_path):
    device = TraceOptions(platform=load_platform("h100"))
    usual = analyse_traces([eager], device).ranks[0].attribution.kernels
    capture, graph = split_graph(eager)
    files = [write(tmp_path / "capture.json", capture), write(tmp_path / "replay.json", graph)]

    report = analyse_traces(files, device)
    kernels = report.ranks[0].attribution.kernels

    assert kernels.modelled == pytest.approx(usual.modelled, abs=0.02)
    half = len(kernels.row) // 2
    assert kernels.predicted[:half] == pytest.approx(kernels.predicted[half:]), "two launches of one graph"
    ops = [op.signature.name for op in trace_workload(report, name="graph").programs[0].ops]
    assert "aten::addmm" in ops


def test_captures_in_the_same_trace_lose_no_kernels_and_cost_no_step(eager, tmp_path):
    capture, graph = split_graph(eager)
    earlier = [{**e, "ts": e["ts"] - capture["traceEvents"][0]["ts"] - 5_000_000} for e in capture["traceEvents"]]
    both = write(tmp_path / "both.json", {**graph, "traceEvents": [*earlier, *graph["traceEvents"]]})
    (rank,) = analyse_traces([both]).ranks
    assert rank.steps[0].by_op.keys() > {"aten::linear"}
    assert not any("launches have no kernel" in note for note in rank.notes)


def test_a_graph_that_nobody_captured_stays_what_it_is(eager, tmp_path):
    """The capture has one call less than the graph has nodes."""
    capture, graph = split_graph(eager)
    calls = [e for e in capture["traceEvents"] if "Launch" in e["name"]]
    capture["traceEvents"].remove(calls[0])
    tied = link_trace(read_kineto(write(tmp_path / "replay.json", graph)))
    files = [write(tmp_path / "capture.json", capture), tmp_path / "replay.json"]
    (rank,) = analyse_traces(files).ranks
    assert (rank.linked.author[rank.linked.device] == rank.linked.launch[rank.linked.device]).all()
    assert len(tied.device) == len(rank.linked.device)


def test_two_runs_of_one_rank_are_still_rejected(eager, tmp_path):
    _, graph = split_graph(eager)
    files = [write(tmp_path / f"{name}.json", {**graph, "distributedInfo": {"rank": 0}}) for name in "ab"]
    with pytest.raises(TraincastError, match="are both of rank 0"):
        analyse_traces(files)
