"""Traces of untrusted input: what is missing, doubled or hostile is rejected or noted, and sizes cost in proportion."""

from __future__ import annotations

import json
import time

import pytest

from tests.traces.damaged import kineto_document
from tests.traces.timelines import event, kernel, launch, op, small_events, step, write_trace
from traincast.app.cli.main import main
from traincast.traces.kineto import read_kineto
from traincast.traces.replay.analysis import analyse_traces
from traincast.utils.errors import TraincastError


def refusal(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    return err


def test_two_lists_of_events_are_refused(tmp_path):
    events = json.dumps(small_events())
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": {events}, "traceEvents": {events}}}')
    with pytest.raises(TraincastError, match="'traceEvents' twice"):
        read_kineto(path)


def test_kernels_without_a_duration_are_left_out_with_a_note(tmp_path):
    events = small_events()
    del next(e for e in events if e["cat"] == "kernel")["dur"]
    trace = read_kineto(write_trace(tmp_path / "t.json", events))
    assert trace.skipped == 1
    assert any("make no sense" in note for note in trace.notes)


def test_a_trace_without_durations_is_refused(tmp_path):
    events = small_events()
    for entry in events:
        del entry["dur"]
    with pytest.raises(TraincastError, match=r"no ops, launches or kernels|too damaged"):
        read_kineto(write_trace(tmp_path / "t.json", events))


@pytest.mark.parametrize("on", [(), ("--on", "v100")])
def test_a_trace_in_which_no_time_passes_is_refused(tmp_path, capsys, on):
    path = write_trace(tmp_path / "t.json", [{**entry, "ts": 0, "dur": 0} for entry in small_events()])
    assert "all events are at one moment" in refusal(capsys, "trace", path, *on)


def test_kernels_of_no_time_have_a_finite_prediction(tmp_path, capsys):
    events = [{**entry, "dur": 0} if entry["cat"] == "kernel" else entry for entry in small_events()]
    assert main(["trace", str(write_trace(tmp_path / "t.json", events)), "--on", "v100", "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_names_cannot_forge_lines(tmp_path, capsys):
    events = small_events()
    for entry in events:
        if entry["cat"] != "user_annotation":
            entry["name"] += "\n\x1b[31mstep 1 ms\r"
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps({"traceEvents": events, "deviceProperties": [{"id": 0, "name": "a\nb"}]}), encoding="utf-8"
    )
    trace = read_kineto(path)
    assert all(name.isprintable() for name in (*trace.names, trace.device_name))
    assert main(["trace", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_bytes_that_are_no_text_in_the_header_are_passed_over(tmp_path):
    path = tmp_path / "t.json"
    body = json.dumps(small_events()).encode()
    path.write_bytes(b'{"deviceProperties": [{"id": 0, "name": "\xff\xfe"}], "\xff": 1, "traceEvents": ' + body + b"}")
    assert read_kineto(path).device_name == ""


def test_huge_sizes_make_no_workload_or_one_line(tmp_path, capsys):
    events = [
        *step(op("aten::mm", 100, 60, [[2**62, 2**62], [2**62, 2**62]]), launch(1, 120, 10), kernel(1, 150, 400)),
    ]
    path = write_trace(tmp_path / "t.json", events)
    assert main(["trace", str(path), "--workload-out", str(tmp_path / "w.tc")]) in (0, 2)
    assert "internal error" not in capsys.readouterr().err


def many(count, *, threads=False, streams=False):
    """This many ops of one launch each, all on one thread and stream, or each on its own."""
    events = [event("user_annotation", "ProfilerStep#1", 0, 250 * count, 0)]
    for number in range(count):
        at, tid, stream = 250 * number + 10, number if threads else 0, number if streams else 7
        events += [
            op("aten::mm", at, 60, [[4, 4], [4, 4]], tid), launch(number + 1, at + 5, 5, tid),
            kernel(number + 1, at + 20, 1000, stream),
        ]  # fmt: skip
    return events


@pytest.mark.parametrize("kind", ["threads", "streams"])
def test_thousands_of_threads_and_streams_cost_in_proportion(tmp_path, kind):
    def seconds(count):
        path = write_trace(tmp_path / "t.json", many(count, **{kind: True}))
        begin = time.process_time()
        analyse_traces([path])
        return time.process_time() - begin

    seconds(50)  # imports
    assert seconds(4000) < 64 * max(seconds(250), 0.1), "16 times as many; in quadratic time it takes 256 times"


def test_an_empty_name_is_no_folder():
    with pytest.raises(TraincastError, match="'' is no trace"):
        analyse_traces([""])


@pytest.mark.parametrize("option", ["--trace-out", "--workload-out"])
@pytest.mark.parametrize("whole", [True, False])
def test_no_output_replaces_an_input(tmp_path, capsys, option, whole):
    path = write_trace(tmp_path / "t.json", small_events())
    before = path.read_bytes()
    assert "it is also read" in refusal(capsys, "trace", tmp_path if whole else path, option, path)
    assert "give the path of a file" in refusal(capsys, "trace", path, option, tmp_path)
    assert path.read_bytes() == before


FORGED = "\n!forged\x1b[31m"


def with_odd_names(document):
    """Line breaks and terminal escapes in every name: ops, kernels, threads, groups, collectives, devices."""
    for number, entry in enumerate(document["traceEvents"]):
        if entry["cat"] in ("cpu_op", "cuda_runtime"):
            entry["tid"] = f"{entry['tid']}{FORGED}"
        if entry["cat"] in ("cpu_op", "kernel"):
            entry["name"] += FORGED
        if entry["cat"] == "kernel" and number % 2:
            entry["name"] = f"ncclDevKernel_AllReduce{FORGED}"
            names = {"Collective name": "nobody's", "Process Group Name": "default", "dtype": "Float"}
            entry["args"] |= {key: name + FORGED for key, name in names.items()}
    named = [{"ph": "M", "name": kind, "pid": 100, "tid": 100, "args": {"name": kind + FORGED}} for kind in
             ("thread_name", "process_name")]  # fmt: skip
    document["traceEvents"] += named
    document["deviceProperties"][0]["name"] += FORGED
    return document


@pytest.mark.parametrize("more", [[], ["--on", "v100"]])
def test_no_name_of_a_trace_forges_a_line_of_the_report(tmp_path, capsys, more):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(with_odd_names(kineto_document(steps=3))))
    assert main(["trace", str(path), "--full", *more]) == 0
    said = capsys.readouterr().out
    assert "default\\n!forged" in said
    assert "\x1b" not in said
    assert [line for line in said.splitlines() if line.startswith("!forged")] == []


def test_ranks_put_together_in_one_file_are_refused(tmp_path):
    events = [{**event("user_annotation", "ProfilerStep#1", 0, 100), "pid": pid} for pid in (1, 2)]
    path = write_trace(tmp_path / "t.json", [*events, launch(1, 10), kernel(1, 20, 30)])
    with pytest.raises(TraincastError, match="steps of 2 processes"):
        analyse_traces([path])
