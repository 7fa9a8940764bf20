"""Sound files of every dialect give the right columns."""

from __future__ import annotations

import gzip
import json

import numpy as np
import orjson
import pytest

from tests.traces import damaged
from traincast.traces import events
from traincast.traces.events import Kind, TimelineTrace
from traincast.traces.execution import ExecutionTrace, read_execution_trace
from traincast.traces.formats import read_ranks, read_trace_file
from traincast.traces.kineto import read_kineto
from traincast.utils.errors import TraincastError


def write(path, document, **options):
    path.write_text(json.dumps(document, **options))
    return path


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"separators": (",", ":")}])
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 19])
def test_columns_do_not_depend_on_layout_or_chunks(tmp_path, monkeypatch, options, chunk):
    monkeypatch.setattr("traincast.traces.scan.CHUNK", chunk)
    document = damaged.kineto_document(steps=20)
    trace = read_kineto(write(tmp_path / "t.json", document, **options))
    assert trace.events["start"].tolist() == [1000 * event["ts"] for event in document["traceEvents"]]
    assert [trace.names[i] for i in trace.events["name"]] == [event["name"] for event in document["traceEvents"]]
    assert (trace.rank, trace.world_size, trace.device_name) == (0, 1, "Test GPU")
    assert json.loads(trace.details[trace.events["details"].max()])["dims"] == [[4, 4]]


def test_the_old_dialect_reads_like_the_new_one(tmp_path):
    new = damaged.kineto_document()
    old = json.loads(json.dumps(new))
    names = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "user_annotation": "Operator"}
    for event in old["traceEvents"]:
        event["cat"] = names[event["cat"]]
        event["args"] = {k.replace("External id", "external id"): v for k, v in event["args"].items()}
    del old["deviceProperties"], old["distributedInfo"]
    a, b = read_kineto(write(tmp_path / "new.json", new)), read_kineto(write(tmp_path / "old.json", old))
    for column in ("start", "duration", "external", "correlation", "stream"):
        assert (a.events[column] == b.events[column]).all()
    assert (b.rank, b.device_name) == (None, "")


def test_nanosecond_times_are_recognised(tmp_path):
    document = damaged.kineto_document()
    for event in document["traceEvents"]:
        event["ts"], event["dur"] = 1000 * event["ts"] + 7, 1000 * event["dur"]
    trace = read_kineto(write(tmp_path / "t.json", document))
    assert trace.events["start"][0] == document["traceEvents"][0]["ts"]
    assert "times are in nanoseconds" in trace.notes


def test_long_traces_spill_to_disk_and_read_the_same(tmp_path, monkeypatch):
    document = damaged.kineto_document(steps=60)
    path = write(tmp_path / "t.json", document, indent=1)
    in_memory = read_kineto(path)
    monkeypatch.setattr("traincast.traces.scan.CHUNK", 4096)
    monkeypatch.setattr(events, "_ROWS_IN_MEMORY", 100)
    spilled = read_kineto(path)
    assert isinstance(spilled.events.base, np.memmap)
    assert (spilled.events == in_memory.events).all()


def test_a_trace_without_kernels_or_ops_is_refused(tmp_path):
    path = write(tmp_path / "t.json", {"traceEvents": [{"ph": "X", "cat": "v8", "name": "x", "ts": 1, "dur": 1}]})
    with pytest.raises(TraincastError, match="no ops, launches or kernels"):
        read_kineto(path)


def test_files_of_a_folder_are_paired_by_rank(tmp_path):
    for rank in (1, 0):
        document = damaged.kineto_document()
        document["distributedInfo"]["rank"] = rank
        write(tmp_path / f"kineto_rank{rank}.json", document)
        write(tmp_path / f"et_rank{rank}.json", damaged.execution_document())
    (tmp_path / "notes.txt").write_text("not a trace")
    ranks = read_ranks([tmp_path])
    assert [entry.rank for entry in ranks] == [0, 1]
    assert all(entry.timeline and entry.execution for entry in ranks)


def test_two_timelines_of_one_rank_are_refused(tmp_path):
    for name in ("a.json", "b.json"):
        write(tmp_path / name, damaged.kineto_document())
    with pytest.raises(TraincastError, match="both of rank 0"):
        read_ranks([tmp_path])


def test_stream_handles_of_amd_are_read(tmp_path):
    document = damaged.kineto_document()
    launches = [event for event in document["traceEvents"] if event.get("cat") == "cuda_runtime"]
    launches[0]["args"]["stream"] = "0x0"
    launches[1]["args"]["stream"] = "0x55674ecd4180"

    trace = read_trace_file(write(tmp_path / "amd.json", document))

    streams = trace.events["stream"][trace.events["kind"] == int(Kind.RUNTIME)].tolist()
    assert streams[:2] == [0, -1]
    assert trace.skipped == 0


def is_kept(recorded):
    return recorded["cat"] in CATEGORIES or recorded["name"].startswith("nn.Module: ")


def test_every_public_trace_is_read_whole(shared_data):
    files = sorted((shared_data / "traces").glob("*/*.gz"))
    assert len(files) >= 45
    for file in files[1::3]:
        trace = read_trace_file(file)
        assert trace.notes == ()
        raw = b"" if file.name.endswith(".et.gz") else gzip.decompress(file.read_bytes())
        if isinstance(trace, TimelineTrace):
            kept = [e for e in orjson.loads(raw)["traceEvents"] if e["ph"] == "X" and is_kept(e)]
            assert len(trace.events) == len(kept)
            assert trace.events["duration"].sum() == pytest.approx(1000 * sum(e["dur"] for e in kept), rel=1e-12)
        elif raw:
            document = orjson.loads(raw)
            assert len(trace.nodes) == len(document.get("nodes") or document["workload_graph"])


CATEGORIES = {
    "cpu_op", "Operator", "user_annotation", "cuda_runtime", "Runtime", "kernel", "Kernel", "gpu_memcpy", "Memcpy",
    "gpu_memset", "Memset", "cuda_sync", "cuda_driver", "overhead", "gpu_user_annotation",
}  # fmt: skip


def test_execution_trace_dialects_give_the_same_columns(tmp_path):
    old = damaged.execution_document()
    new = {"schema": "1.1.1-chakra.0.0.4", "nodes": []}
    for node in old["nodes"]:
        attributes = {"rf_id": node["rf_id"], "seq_id": node["seq_id"], "tid": node["tid"], "scope": node["scope"]}
        new["nodes"].append(
            {
                "id": node["id"], "name": node["name"], "ctrl_deps": node["parent"],
                "inputs": {"values": [], "shapes": node.get("input_shapes", []), "types": []},
                "attrs": [{"name": k, "type": "int64", "value": v} for k, v in attributes.items()],
            }
        )  # fmt: skip
    a = read_execution_trace(write(tmp_path / "old.json", old))
    b = read_execution_trace(write(tmp_path / "new.json", new))
    for column in ("id", "parent", "record_function", "sequence", "thread", "scope"):
        assert (a.nodes[column] == b.nodes[column]).all()


def test_chakra_nodes_have_their_dependencies(tmp_path):
    path = tmp_path / "rank0.et"
    path.write_bytes(damaged.chakra_bytes(5))
    trace = read_trace_file(path)
    assert isinstance(trace, ExecutionTrace)
    assert trace.nodes["id"].tolist() == [1, 2, 3, 4, 5]
    assert trace.needs.tolist() == [1, 2, 3, 4]


def test_amd_traces_are_linked_by_correlation(shared_data):
    trace = read_kineto(shared_data / "traces/tracelens_mi300x_resnet/kineto_rank0of8.json.gz")
    assert trace.device_name == "AMD Instinct MI300X"
    assert (trace.events["bytes"][trace.find_rows(Kind.MEMCPY)] > 0).sum() == 366
