"""The same run as other profilers and tools would have written it: what is still there gives the same sums."""

from __future__ import annotations

import copy
import json

import pytest

from tests.traces.timelines import event, kernel, launch, op, write_trace
from traincast.app.cli.main import main
from traincast.traces.kineto import read_kineto
from traincast.traces.replay.analysis import TraceOptions, analyse_traces
from traincast.utils.errors import TraincastError

SUMS = ("step", "compute", "communication", "exposed_comm", "idle", "kernels", "by_family")
REASONS = ("host_bound", "synchronised", "event_wait", "graph_nodes", "launch_latency", "not_recorded")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def run(steps=4):
    """Steps of 1 ms on two streams: a copy, GEMMs and a norm on one, an all-reduce half alongside them on the other."""
    events, number = [], 0
    for step in range(steps):
        at = 5000 + 1000 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", at, 1000))
        work = [
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 40, 30, 7),
            ("kernel", "ampere_sgemm_128x64_tn", 100, 200, 7),
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 250, 150, 20),
            ("kernel", "vectorized_layer_norm_kernel", 450, 100, 7),
            ("kernel", "ampere_sgemm_128x64_nn", 560, 300, 7),
        ]  # fmt: skip
        for place, (category, name, start, length, stream) in enumerate(work):
            number += 1
            begin = at + 20 + 60 * place
            call = "cudaMemcpyAsync" if category == "gpu_memcpy" else "cudaLaunchKernel"
            events += [op(f"aten::op{place}", begin, 50, [[64, 64]]), launch(number, begin + 5, 10, name=call)]
            events.append(kernel(number, at + start, length, stream, name))
            events[-1]["cat"] = category
            for entry in events[-3:]:
                entry["args"]["External id"] = number
        number += 1
        events.append(launch(number, at + 700, 170, name="cudaDeviceSynchronize"))
    return events


def changed(change):
    """The run with every event changed in place, or with other events instead."""
    events = copy.deepcopy(run())
    for entry in events:
        change(entry)
    return events


def report_of(tmp_path, events, name="t.json", **members):
    path = tmp_path / name
    path.write_text(json.dumps({**members, "traceEvents": events}))
    return analyse_traces([path]).ranks[0]


def sums(report, names=(*SUMS, *REASONS)):
    return [{name: getattr(step, name) for name in names} for step in report.steps]


def as_text(*keys):
    def change(entry):
        for key in keys:
            if key in entry["args"]:
                entry["args"][key] = str(entry["args"][key])

    return change


def streams_as(form):
    def change(entry):
        if "stream" in entry["args"]:
            entry["args"]["stream"] = form(entry["args"]["stream"])

    return change


def without_place(entry):
    """Device and stream only by the track."""
    if entry["cat"] in ON_DEVICE:
        entry["tid"] = f"stream {entry['args'].pop('stream')}"
        del entry["args"]["device"]


def with_text_times(entry):
    entry["ts"], entry["dur"] = str(entry["ts"]), str(entry["dur"])


def with_huge_processes(entry):
    if entry["cat"] not in ON_DEVICE:
        entry["pid"], entry["tid"] = 2**64 - entry["pid"], 2**63 + entry["tid"]


def with_nulls(entry):
    if entry["cat"] == "cpu_op":
        entry["args"] |= {"External id": None, "Sequence number": None, "Fwd thread id": None}


def with_nan(entry):
    entry["args"]["est. achieved occupancy %"] = float("nan")
    entry["args"]["Record function id"] = float("inf")


def in_old_words(entry):
    words = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "gpu_memcpy": "Memcpy"}
    entry["cat"] = words.get(entry["cat"], "Operator")


def in_amds_words(entry):
    entry["name"] = entry["name"].replace("cudaLaunchKernel", "hipExtModuleLaunchKernel").replace("cuda", "hip")


def with_devices_by_name(entry):
    if "device" in entry["args"]:
        entry["args"]["device"] = f"cuda:{entry['args']['device']}"


@pytest.mark.parametrize("change", [
    as_text("correlation", "External id", "stream", "device"),
    streams_as(lambda stream: hex(0x55D000000000 + 64 * stream)),
    streams_as(lambda stream: f"stream {stream}"),
    streams_as(lambda stream: {7: "compute", 20: "comm"}[stream]),
    streams_as(float),
    without_place, with_text_times, with_huge_processes, with_nulls, with_nan, in_old_words, in_amds_words,
    with_devices_by_name,
])  # fmt: skip
def test_other_ways_to_write_it_give_the_same_sums_reasons_and_gains(tmp_path, change):
    plain, other = report_of(tmp_path, run()), report_of(tmp_path, changed(change), "other.json")

    assert sums(other) == sums(plain)
    assert other.path.faster == pytest.approx(plain.path.faster)
    assert other.notes == plain.notes


def test_events_that_stand_there_twice_count_once_and_are_said(tmp_path):
    plain, doubled = report_of(tmp_path, run()), report_of(tmp_path, [*run(), *run()], "doubled.json")

    assert sums(doubled) == sums(plain)
    assert doubled.notes == (f"{len(run())} events stand in the file more than once and count once",)


def test_relative_times_and_what_profilers_add_change_nothing(tmp_path):
    marks = [
        {**event("Trace", "PyTorch Profiler (0)", 0, 9000), "pid": "Spans"},
        event("overhead", "CUPTI Overhead", 5010, 500),
        {"ph": "i", "cat": "", "name": "Iteration Start: PyTorch Profiler", "ts": 5000, "pid": "Traces", "tid": "x"},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "ts": 5025, "pid": 9, "tid": 1},
    ]
    added = report_of(tmp_path, [*run(), *marks], displayTimeUnit="ns", baseTimeNanoseconds=1_700_000_000_000_000_000)

    assert sums(added) == sums(report_of(tmp_path, run(), "plain.json"))


def kernels_only(*more):
    return [entry for entry in run() if entry["cat"] in (*ON_DEVICE, *more)]


def on_device_track(name, start, length, stream):
    return {**event("gpu_user_annotation", name, start, length, stream), "pid": 0}


def test_kernels_alone_have_sums_families_and_gaps_but_no_reasons_or_gains(tmp_path, capsys):
    marks = [on_device_track(f"ProfilerStep#{n}", 5000 + 1000 * n, 1000, s) for n in range(4) for s in (7, 20)]
    report = report_of(tmp_path, [*kernels_only(), *marks])

    assert sums(report, SUMS) == sums(report_of(tmp_path, run(), "whole.json"), SUMS)
    assert [step.not_recorded for step in report.steps] == [step.idle for step in report.steps]
    assert [step.number for step in report.steps] == [0, 1, 2, 3]
    assert (report.path.faster, report.profile.launches, report.overheads.table) == ({}, (), {})
    assert [row.count for row in report.profile.kernels] == [4] * 5
    assert report.profile.exchanges[0].kind == "all_reduce"
    assert "nothing of the host is in the trace" in " ".join(report.notes)
    assert main(["trace", str(tmp_path / "t.json")]) == 0
    page = capsys.readouterr().out
    assert "idle: reason not recorded" in page
    assert not any(word in page for word in ("host-bound", "Twice as fast", "host overhead", "Launches:"))


def test_steps_of_kernels_alone_are_told_by_their_sequence(tmp_path):
    body = [entry for entry in run(steps=6) if entry["cat"] in ON_DEVICE]
    report = report_of(tmp_path, body)

    assert report.linked.period == 5
    assert [step.seconds for step in report.linked.steps] == pytest.approx([1e-3] * 4)
    assert report.linked.get_name(
        int(report.linked.device[report.linked.step[report.linked.device] == 0][0])
    ).startswith("Memcpy")  # after the longest pause of the device


def test_kernels_alone_cannot_be_predicted_and_have_no_what_ifs(tmp_path):
    path = write_trace(tmp_path / "t.json", kernels_only())
    for question in (TraceOptions(twice=("gemm",)),):
        with pytest.raises(TraincastError, match="no launches of its kernels"):
            analyse_traces([path], question)


@pytest.mark.parametrize("more", [["--on", "v100"], ["--workload-out", "w.tc"]])
def test_predictions_of_kernels_alone_are_refused_in_one_line(tmp_path, capsys, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    path = write_trace(tmp_path / "t.json", kernels_only())
    assert main(["trace", str(path), *more]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_kernels_and_calls_without_ops_keep_reasons_and_gains_of_families(tmp_path):
    whole = report_of(tmp_path, run())
    report = report_of(tmp_path, kernels_only("cuda_runtime", "user_annotation"), "calls.json")

    assert sums(report) == sums(whole)
    for name in ("host", "gemm", "norm", "communication"):
        assert report.path.faster[name] == pytest.approx(whole.path.faster[name], abs=1e-9)


def of_rank(number, events):
    return [{**entry, "pid": f"[TP{number}] {entry['pid']}"} for entry in events]


def test_calls_of_ranks_in_one_file_that_count_alike_are_refused(tmp_path):
    unmarked = [entry for entry in run() if entry["cat"] != "user_annotation"]
    with pytest.raises(TraincastError, match="calls of 2 processes"):
        report_of(tmp_path, [*of_rank(0, unmarked), *of_rank(1, unmarked)])


def test_kernels_of_ranks_in_one_file_are_told_apart(tmp_path):
    report = report_of(tmp_path, [*of_rank(0, kernels_only()), *of_rank(1, kernels_only())])

    assert len(set(report.linked.stream[report.linked.device].tolist())) == 4
    assert "kernels of 2 processes" in " ".join(report.notes)


def test_what_cannot_be_understood_of_an_events_arguments_is_as_if_it_had_not_been_recorded(tmp_path):
    events = run()
    events[1]["args"] |= {"External id": [1], "Input Dims": [[4]], "Input type": ["float"], "Sequence number": {}}
    trace = read_kineto(write_trace(tmp_path / "t.json", events))

    assert trace.skipped == 0
    assert b'"dims":[[4]]' in b"".join(trace.details)


def test_microseconds_since_1970_lose_nothing_as_floats(tmp_path):
    def later(entry):
        entry["ts"] = 1_700_000_000_000_001 + entry["ts"]

    def as_floats(entry):
        later(entry)
        entry["ts"], entry["dur"] = float(entry["ts"]), float(entry["dur"])

    whole, other = report_of(tmp_path, changed(later)), report_of(tmp_path, changed(as_floats), "floats.json")
    assert sums(other) == sums(whole)


def test_annotations_on_devices_that_make_no_sense_refuse_no_trace(tmp_path):
    odd = [{**on_device_track("nccl:all_reduce", 5000, 1, 20), "dur": -3} for _ in range(50)]
    report = report_of(tmp_path, [*run(), *odd])

    assert (report.linked.trace.skipped, report.notes) == (0, ())
