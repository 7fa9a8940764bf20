"""Traces that say something wrong without a word: real ones, damaged as profilers and people damage them. Each gets the
right number, or a note."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.traces.timelines import event, kernel, launch, linked, op, step, write_trace
from traincast.app.cli.main import main
from traincast.app.report.compared import state_traces
from traincast.costs.host.profile import load_host_profile
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.overheads.extraction import ProfilerCost, measure_overheads
from traincast.traces.replay.analysis import analyse_traces, note_slow_steps
from traincast.traces.replay.compare import compare_reports
from traincast.traces.replay.host import pool_host
from traincast.traces.replay.timeline import make_timeline_instructions
from traincast.traces.replay.workload import trace_workload

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@pytest.fixture(scope="module")
def public(shared_data):
    """The folder of small public traces."""
    folder = shared_data / "traces" / "public_mixed"
    if not folder.is_dir():
        pytest.skip(f"no public traces at {folder}")
    return folder


def damage(source, path, change):
    """A trace with `change` made to its list of events."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    document["traceEvents"] = change(document["traceEvents"])
    path.write_text(json.dumps(document))
    return path


def shift_device(microseconds):
    def change(events):
        return [{**e, "ts": e["ts"] + microseconds} if e.get("cat") in _ON_DEVICE and "ts" in e else e for e in events]

    return change


def test_a_host_that_runs_ahead_is_compared_by_the_device(public):
    before, after = (analyse_traces([public / f"luatil_3060_0{number}.json.gz"]) for number in (5, 6))
    assert after.ranks[0].median_step.step == pytest.approx(0.170, rel=0.01)
    first, second = compare_reports(before, after).step
    assert second / first == pytest.approx(170 / 22.9, rel=0.02)
    assert state_traces(after)[0].startswith("170 ms per step")


@pytest.mark.parametrize("shift", [-500, 500])
def test_a_device_clock_that_differs_is_put_right(public, tmp_path, shift):
    source = public / "kernelforge_gh200.json.gz"
    whole = link_trace(read_kineto(source))
    moved = link_trace(read_kineto(damage(source, tmp_path / "t.json", shift_device(shift))))
    assert f"kernels are put that much {'later' if shift < 0 else 'earlier'}" in moved.clocks
    apart = moved.events["start"][moved.device] - whole.events["start"][whole.device]
    assert abs(1e-3 * float(apart.mean())) < 0.1 * abs(shift)
    assert not whole.clocks


def test_lost_kernels_are_said(public, tmp_path):
    def lose(events):
        kept = [e for e in events if e.get("cat") in _ON_DEVICE][:3]
        return [e for e in events if e.get("cat") not in _ON_DEVICE] + kept

    notes = analyse_traces([damage(public / "kernelforge_gh200.json.gz", tmp_path / "t.json", lose)]).ranks[0].notes
    assert any("launches have no kernel in the trace: the profiler lost them" in note for note in notes)


def test_work_launched_before_the_trace_is_no_idle_time(public, tmp_path):
    source = public / "luatil_3060_05.json.gz"

    def forget_calls(events):
        calls = sorted(e["ts"] for e in events if e.get("cat") == "cuda_runtime")
        until = calls[len(calls) // 2]
        return [e for e in events if e.get("cat") not in ("cuda_runtime", "cuda_driver") or e["ts"] > until]

    whole, cut = (
        analyse_traces([path]).ranks[0] for path in (source, damage(source, tmp_path / "t.json", forget_calls))
    )
    busy = [sum(step.active for step in rank.steps) / sum(step.step for step in rank.steps) for rank in (whole, cut)]
    assert busy[1] == pytest.approx(busy[0], abs=0.02)
    assert cut.median_step.step == pytest.approx(whole.median_step.step, rel=0.05)
    assert any("launched before the trace began" in note for note in cut.notes)
    assert any("2 steps at the begin have no launch calls in the trace" in note for note in cut.notes)


def test_missing_ranks_and_a_single_one_are_said(public):
    folder = public / "megatron_tp8"
    if not folder.is_dir():
        pytest.skip("the eight ranks of Megatron are not there")
    few = analyse_traces([folder / f"megatron_kineto_{rank}.json.gz" for rank in (0, 1)])
    assert few.together is not None
    assert any("6 ranks of the run are missing" in note for note in few.together.notes)
    alone = analyse_traces([folder / "megatron_kineto_0.json.gz"])
    assert any("one rank of 8" in note for note in alone.ranks[0].notes)


def test_an_amd_agent_beyond_the_devices_is_one_of_them(tmp_path):
    path = write_trace(tmp_path / "t.json", step(launch(1, 10), kernel(1, 20, 100)))
    document = json.loads(path.read_text())
    document["deviceProperties"] = [{"id": number, "name": "AMD Instinct MI300X"} for number in range(8)]
    for e in document["traceEvents"]:
        if e["cat"] == "kernel":
            e["args"]["device"] = 9
    path.write_text(json.dumps(document))
    assert read_kineto(path).device_name == "AMD Instinct MI300X"
    document["deviceProperties"][0]["name"] = "AMD Instinct MI250X"
    path.write_text(json.dumps(document))
    assert read_kineto(path).device_name == ""


@pytest.mark.parametrize("device_type", [1, 6, 12, 19, 20])
def test_memory_of_every_kind_of_accelerator_is_read(tmp_path, device_type):
    allocation = {
        "ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 9, "tid": 1, "ts": 15,
        "args": {"Bytes": 512, "Device Type": device_type, "Device Id": 0, "Total Allocated": 512},
    }  # fmt: skip
    path = write_trace(tmp_path / "t.json", [*step(launch(1, 10), kernel(1, 20, 100)), allocation])
    assert read_kineto(path).memory["bytes"].tolist() == [512]


def test_steps_that_differ_are_named_with_their_reason(tmp_path):
    events = []
    for number, begin, wait in ((1, 0, 0), (2, 1000, 0), (3, 2000, 2000), (4, 5000, 0)):
        at = begin + wait
        events += [
            event("user_annotation", f"ProfilerStep#{number}", begin, 1000 + wait),
            event("cpu_op", "enumerate(DataLoader)#next", begin + 1, wait + 5),
            event("cpu_op", "aten::mm", at + 20, 30), launch(number, at + 30), kernel(number, at + 50, 900),
        ]  # fmt: skip
    report = analyse_traces([write_trace(tmp_path / "t.json", events)])
    (said,) = note_slow_steps(report.ranks[0].steps)
    assert (
        "1 of 4 steps take over 1.25 times the median: step 3 3 ms "
        "(+2 ms of it host bound while the host is in enumerate(DataLoader)#next)" in said
    )
    assert "the mean is 1.5 ms" in said
    assert "(1.00 to 3.00 ms, mean 1.50 ms)" in state_traces(report)[0]


def test_a_synchronisation_is_no_overhead_while_the_device_works(tmp_path):
    waits = event("cuda_runtime", "cudaDeviceSynchronize", 40, 105, correlation=9)
    timeline = linked(tmp_path, step(event("cpu_op", "aten::mm", 5, 150), launch(1, 10), kernel(1, 20, 120), waits))
    samples = measure_overheads(timeline, ProfilerCost(op=0.0, call=0.0)).table["T4", "synchronize"]
    assert samples.total == pytest.approx(5e-6)  # 145 less the kernel's end at 140


def test_a_traced_step_keeps_its_data_loader_and_tf32(tmp_path):
    mm = event("cpu_op", "aten::mm", 410, 50, **{"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]})
    events = step(
        event("cpu_op", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 400), mm, launch(1, 420),
        kernel(1, 440, 100, name="ampere_sgemm_tf32_128x64"),
    )  # fmt: skip
    made = trace_workload(analyse_traces([write_trace(tmp_path / "t.json", events)]), name="traced")
    assert made.meta["loader"] == "0.4000 0"
    assert made.tf32 == ("products",)


def test_what_the_profiler_takes_is_said(public):
    (rank,) = analyse_traces([public / "resnet50_t4_b.json.gz"]).ranks
    (note,) = [note for note in rank.notes if note.startswith("recording takes about")]
    assert "T1 to T5 are without it" in note
    told = rank.to_dict()["profiler_cost_us"]
    assert told["step"] > 0.05 * 1e6 * rank.median_step.step
    assert told["op"] <= 2.0 and told["call"] <= 4.0


def test_a_forecast_for_another_gpu_comes_first_and_has_no_error(public, capsys):
    assert main(["trace", str(public / "resnet50_t4_b.json.gz"), "--on", "a10"]) == 0
    first, second, *_ = out = capsys.readouterr().out.splitlines()
    assert first.startswith("Forecast on a10 (host time of this trace): ") and "measured on Tesla T4: " in first
    assert "90 % interval" in second and "of kernel time is modelled" in second
    assert not any("GMAE" in line for line in out)


def test_code_between_ops_is_as_long_as_pythons_tracer_saw_it(tmp_path):
    """Under the tracer the gap before an op is told by the calls in it, not by the profile's mean."""

    def pool_gap(calls):
        traced = [event("python_function", f"f{n}", 110 + n, 1) for n in range(calls)]
        events = step(op("aten::mm", 10, 90, [[8, 8]]), launch(1, 20), kernel(1, 40, 30), *traced,
                      op("aten::mm", 180, 90, [[8, 8]]), launch(2, 190), kernel(2, 210, 30))  # fmt: skip
        timeline = linked(tmp_path, events)
        host = pool_host(timeline, make_timeline_instructions(timeline), load_host_profile("server-2022"))
        return host.sum_by_op()["T1", ""][1]

    usual = load_host_profile("server-2022").t1["python"]
    assert pool_gap(30) - pool_gap(10) == pytest.approx(usual * 0.067 * 40)
