"""Whatever a file holds, it is read, or rejected in one line: no traceback, no hang, no flood of memory."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.traces import damaged
from traincast.traces.chakra import read_chakra
from traincast.traces.events import TimelineTrace
from traincast.traces.execution import read_execution_trace
from traincast.traces.formats import read_trace_file
from traincast.utils.errors import TraincastError

SOUND = json.dumps(damaged.kineto_document(), indent=1).encode()
EXECUTION = json.dumps(damaged.execution_document()).encode()

CORPUS = [
    *damaged.truncations(SOUND, 40),
    *damaged.truncations(gzip.compress(SOUND), 20),
    *damaged.flips(SOUND, 60),
    *damaged.flips(gzip.compress(SOUND), 20, seed=1),
    *damaged.wrong_values(),
    *damaged.oddities(),
]
EXECUTION_CORPUS = [*damaged.truncations(EXECUTION, 15), *damaged.flips(EXECUTION, 30, seed=2)]
CHAKRA_CORPUS = [*damaged.truncations(damaged.chakra_bytes(), 15), *damaged.flips(damaged.chakra_bytes(), 40, seed=3)]


def read_or_refuse(reader, path):
    try:
        return reader(path)
    except TraincastError as error:
        message = str(error)
    assert "\n" not in message
    return None


def test_the_corpus_is_large_enough():
    assert len(CORPUS) + len(EXECUTION_CORPUS) + len(CHAKRA_CORPUS) >= 200


def test_every_damaged_timeline_is_read_or_refused(tmp_path):
    path, read = tmp_path / "trace.json", 0
    for what, data in CORPUS:
        path.write_bytes(data)
        began = time.process_time()
        read += read_or_refuse(read_trace_file, path) is not None
        assert time.process_time() - began < 10, what
    assert 0 < read < len(CORPUS)


@pytest.mark.parametrize(("reader", "corpus"), [(read_execution_trace, EXECUTION_CORPUS), (read_chakra, CHAKRA_CORPUS)])
def test_every_damaged_execution_trace_is_read_or_refused(tmp_path, reader, corpus):
    path = tmp_path / "trace"
    for _, data in corpus:
        path.write_bytes(data)
        read_or_refuse(reader, path)


def test_a_truncated_timeline_keeps_what_came_before(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(SOUND[: 3 * len(SOUND) // 4])
    trace = read_trace_file(path)
    assert 20 < len(trace.events) < len(damaged.kineto_events())
    assert "ends early" in trace.notes[0]


def test_one_senseless_event_is_left_out_and_counted(tmp_path):
    document = damaged.kineto_document(steps=40)
    document["traceEvents"][5]["ts"] = []
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    trace = read_trace_file(path)
    assert trace.skipped == 1
    assert len(trace.events) == len(document["traceEvents"]) - 1


def test_many_senseless_events_are_refused(tmp_path):
    document = damaged.kineto_document(steps=40)
    for event in document["traceEvents"][::10]:
        event["dur"] = -5
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TraincastError, match="too damaged"):
        read_trace_file(path)


@pytest.mark.parametrize("parents", [{2: 3, 3: 2}, {2: 4, 3: 2, 4: 3}])
def test_calls_in_a_circle_are_refused(tmp_path, parents):
    document = damaged.execution_document()
    for node in document["nodes"]:
        node["parent"] = parents.get(node["id"], node["parent"])
    path = tmp_path / "et.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TraincastError, match="circle"):
        read_trace_file(path)


def test_dependencies_in_a_circle_are_refused(tmp_path):
    graph = [{"Id": 1, "Name": "a", "data_deps": [2]}, {"Id": 2, "Name": "b", "data_deps": [1]}]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"workload_graph": graph}))
    with pytest.raises(TraincastError, match="circle"):
        read_trace_file(path)


def test_a_bomb_is_refused_within_a_memory_bound(tmp_path):
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": [{"name": "')
        for _ in range(300):
            file.write(b"a" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(TraincastError, match="single value"):
        read_trace_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.just("X") | JSON, "cat": st.sampled_from(["cpu_op", "kernel", "Runtime", "cuda_sync"]) | JSON,
        "name": JSON, "pid": JSON, "tid": JSON, "ts": st.integers(0, 10**16) | JSON,
        "dur": st.integers(0, 10**6) | JSON,
        "args": st.dictionaries(
            st.sampled_from(["External id", "correlation", "stream", "Input Dims", "bytes", "Collective name"]), JSON
        ) | JSON,
    },
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(EVENTS, max_size=6) | JSON, indent=st.none() | st.integers(0, 3), cut=st.floats(0.2, 1.0))
def test_anything_shaped_like_a_trace_is_read_or_refused(tmp_path_factory, events, indent, cut):
    text = json.dumps({"traceEvents": events}, indent=indent).encode()
    path = tmp_path_factory.mktemp("fuzz") / "trace.json"
    path.write_bytes(text[: int(len(text) * cut)])
    trace = read_or_refuse(read_trace_file, path)
    assert trace is None or isinstance(trace, TimelineTrace)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300), reader=st.sampled_from([read_trace_file, read_execution_trace, read_chakra]))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data, reader):
    path = tmp_path_factory.mktemp("fuzz") / "trace.et"
    path.write_bytes(data)
    read_or_refuse(reader, path)
