"""Traces that say something wrong without a word: real ones, damaged as profilers and people damage them. Each gets the
right number, or a note."""

from __future__ import annotations

import gzip
import json
from functools import partial

import pytest

from tests.traces.timelines import event, kernel, launch, linked, op, step
from traincast import predict
from traincast.app.cli.main import main
from traincast.app.report.compared import state_traces
from traincast.costs.host.profile import load_host_profile
from traincast.hardware.platform import load_platform
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.overheads.extraction import ProfilerCost, measure_overheads
from traincast.traces.replay.analysis import TraceOptions, analyse_traces, note_slow_steps
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
    assert state_traces(after)[0].startswith("170 ms per step, held by kernels")
    replayed = after.ranks[0].replay.steps
    assert [step.simulated for step in replayed] == pytest.approx([step.measured for step in replayed], rel=1e-3)
    assert [step.measured for step in replayed] == [step.step for step in after.ranks[0].steps]


def test_a_forecast_where_the_host_runs_ahead_is_of_the_devices_step(public):
    options = TraceOptions(platform=load_platform("h100"))
    (rank,) = analyse_traces([public / "luatil_3060_06.json.gz"], options).ranks
    assert [step.measured for step in rank.attribution.steps[1:]] == pytest.approx([0.170] * 4, rel=0.03)
    assert rank.attribution.mean_step < 0.3 * 0.170, "five times the flop/s in fp32"
    low, high = rank.attribution.interval
    assert low < rank.attribution.mean_step < high


@pytest.mark.parametrize("shift", [-500, 500])
def test_a_device_clock_that_differs_is_put_right(public, tmp_path, shift):
    source = public / "kernelforge_gh200.json.gz"
    whole = link_trace(read_kineto(source))
    moved = link_trace(read_kineto(damage(source, tmp_path / "t.json", shift_device(shift))))
    assert f"kernels are put that much {'later' if shift < 0 else 'earlier'}" in moved.clocks
    apart = moved.events["start"][moved.device] - whole.events["start"][whole.device]
    assert abs(1e-3 * float(apart.mean())) < 0.1 * abs(shift)
    assert not whole.clocks


def test_a_device_that_is_never_idle_tells_nothing_of_its_clock(shared_data):
    """Kernels wait in its queue for 24 ms: their delays are no clock's."""
    folder = shared_data / "traces" / "tracelens_mi300x_resnet"
    if not folder.is_dir():
        pytest.skip(f"no trace of MI300X at {folder}")
    (rank,) = analyse_traces([folder]).ranks
    assert not rank.linked.clocks
    assert max(abs(step.error) for step in rank.replay.steps) < 1e-3


def test_lost_kernels_are_said(public, tmp_path):
    def lose(events):
        kept = [e for e in events if e.get("cat") in _ON_DEVICE][:3]
        return [e for e in events if e.get("cat") not in _ON_DEVICE] + kept

    report = analyse_traces([damage(public / "kernelforge_gh200.json.gz", tmp_path / "t.json", lose)])
    assert any("launches have no kernel in the trace: the profiler lost them" in n for n in report.ranks[0].notes)
    verdict = state_traces(report)[0]
    assert "45 of 48 launches have no kernel in it, so how busy the device was is not known" in verdict
    assert "host-bound" not in verdict


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
    assert " per step over 2 of 8 ranks, held by rank " in state_traces(few)[0]
    alone = analyse_traces([folder / "megatron_kineto_0.json.gz"])
    assert any("one rank of 8" in note for note in alone.ranks[0].notes)


@pytest.mark.parametrize(("field", "matched"), [("Seq", 82), ("Comms Id", 82), ("In msg nelems", 0)])
def test_lost_collectives_leave_the_others_matched_where_traces_number_them(public, tmp_path, field, matched):
    folder = public / "megatron_tp8"
    if not folder.is_dir():
        pytest.skip("the eight ranks of Megatron are not there")

    def number(events, lost):
        ours = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"]]
        for place, e in enumerate(sorted(ours, key=lambda e: e["ts"])):
            e["args"] |= {"Collective name": "allreduce", "Process Group Name": "tp", "dtype": "Half", field: place + 1}
        gone = [e["args"]["correlation"] for e in ours if e["args"][field] in lost]
        return [e for e in events if e not in ours or e["args"]["correlation"] not in gone]

    ranks = [
        damage(folder / f"megatron_kineto_{rank}.json.gz", tmp_path / f"{rank}.json", partial(number, lost=lost))
        for rank, lost in ((0, ()), (1, (5, 9)))
    ]
    together = analyse_traces(ranks).together
    assert together is not None
    assert (len(together.replay.matches.collectives) if together.replay else 0) == matched
    assert any("not matched over ranks" in note for note in together.notes) == (not matched)


def test_layers_are_no_steps(public):
    """One unmarked pass of equal layers."""
    (rank,) = analyse_traces([public / "switch_a100pcie80_1.json.gz"]).ranks
    assert [step.step for step in rank.steps] == [pytest.approx(0.59, abs=0.02)]
    assert any("but in a small part of the" in note for note in rank.notes)


def test_an_amd_agent_beyond_the_devices_is_one_of_them(shared_data, tmp_path):
    """AMD numbers agents, processors first: kernels of the third GPU of four run on agent 9 of a large host."""
    source = shared_data / "traces" / "hta_mi250_rocm62" / "kineto.json.gz"

    def renumber(events):
        for e in events:
            if e.get("cat") in _ON_DEVICE:
                e["args"]["device"] = 9
        return events

    path = damage(source, tmp_path / "t.json", renumber)
    # whose driver has no name for it: 104 units and 64 GB are those of MI210 and of half an MI250
    assert read_kineto(path).device_name == read_kineto(source).device_name == "AMD Instinct MI210"
    document = json.loads(path.read_text())
    document["deviceProperties"][0]["numSms"] = 105
    path.write_text(json.dumps(document))
    assert read_kineto(path).device_name == "", "two kinds of GPU: nobody knows which"


def test_kernels_without_shapes_are_carried_by_the_type_they_computed_in(public, tmp_path):
    source = public / "vgg16_t4.json.gz"

    def halve(events):
        return [{**e, "name": e["name"].replace("sgemm", "h884gemm").replace("scudnn", "h884cudnn")} for e in events]

    def forecast(path):
        kernels = analyse_traces([path], TraceOptions(platform=load_platform("a100-40gb"))).ranks[0].attribution.kernels
        chosen = [family in ("gemm", "conv") for family in kernels.family]
        return kernels.carried, float(kernels.predicted[chosen].sum() / kernels.measured[chosen].sum())

    (carried, fp32), (_, fp16) = forecast(source), forecast(damage(source, tmp_path / "t.json", halve))
    assert carried
    assert 0.2 < fp32 < 0.7, "8.1 to 19.5 TFLOP/s, no tensor cores"
    assert fp16 < 0.9 * fp32


@pytest.mark.parametrize("device_type", [1, 6, 12, 19, 20])
def test_memory_of_every_kind_of_accelerator_is_read(public, tmp_path, device_type):
    source = public / "kernelforge_gh200.json.gz"

    def retype(events):
        for e in events:
            if e.get("name") == "[memory]" and e["args"]["Device Type"] == 1:
                e["args"]["Device Type"] = device_type
        return events

    found = read_kineto(damage(source, tmp_path / "t.json", retype)).memory
    assert found["bytes"].tolist() == read_kineto(source).memory["bytes"].tolist()
    assert len(found) == 120


def test_steps_that_differ_are_named_with_their_reason(public, tmp_path):
    """The second of three steps of 1.1 to 1.3 ms waits 5 ms before its first op."""
    source = public / "kernelforge_gh200.json.gz"

    def stall(events):
        marks = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
        slow = marks["ProfilerStep#8"]
        late = slow["ts"] + 1
        slow["dur"] += 5000
        return [{**e, "ts": e["ts"] + 5000} if e.get("ts", 0) > late and e is not slow else e for e in events]

    report = analyse_traces([damage(source, tmp_path / "t.json", stall)])
    (said,) = note_slow_steps(report.ranks[0].steps)
    assert "1 of 3 steps take over 1.25 times the median: step 8 6.1" in said
    assert "host bound while the host is between ops" in said
    assert "mean 2.85 ms" in state_traces(report)[0]


def test_a_synchronisation_is_no_overhead_while_the_device_works(public):
    """Its host waits 33 of 50 ms for the device."""
    (rank,) = analyse_traces([public / "vgg16_t4.json.gz"]).ranks
    waits = 1e-9 * float(rank.linked.events["duration"][rank.linked.is_synchronise].sum())
    assert waits > 0.03
    assert rank.overheads.table["T4", "synchronize"].total < 1e-5


def test_a_traced_step_keeps_its_data_loader(public, tmp_path):
    """A step of 1.1 ms that reads its batch for 20 ms before."""
    source = public / "kernelforge_gh200.json.gz"
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

    def load(events):
        marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
        made = []
        for count, mark in enumerate(sorted(marks, key=lambda e: e["ts"]), 1):
            begin = mark["ts"]
            mark["dur"] += 20_000
            for e in events:
                if e.get("ts", 0) > begin and e is not mark:
                    e["ts"] += 20_000
            at = {"ts": begin + 1, "dur": 19_990, "pid": mark["pid"], "tid": mark["tid"]}
            made.append({"ph": "X", "cat": "user_annotation", "name": name, "args": {"External id": -count}, **at})
        return [*events, *made]

    report = analyse_traces([damage(source, tmp_path / "t.json", load)])
    assert report.ranks[0].median_step.step == pytest.approx(21.1e-3, rel=0.02)
    assert trace_workload(report, name="traced").meta["loader"] == "19.9900 0"


def test_a_traced_step_keeps_its_tf32(public):
    assert trace_workload(analyse_traces([public / "transformer_h100_1.json.gz"]), name="traced").tf32 == ("products",)


def test_an_op_on_a_cache_costs_what_it_moved(public, tmp_path):
    """Every sum becomes an op of a server that writes one row into caches of 4 GB."""
    source = public / "kernelforge_gh200.json.gz"
    row, cache = [1, 8, 128], [131072, 8, 1, 128]

    def cached(events):
        for e in events:
            if e.get("name") in ("aten::add", "aten::add_"):
                e["name"] = "_C_cache_ops::reshape_and_cache_flash"
                e["args"] |= {"Input Dims": [row, row, cache, cache], "Input type": ["float"] * 4}
        return events

    report = analyse_traces([damage(source, tmp_path / "t.json", cached)])
    kernels = 1e-3 * sum(predict(trace_workload(report, name="traced"), on="gh200").to_dict()["per_family"].values())
    assert kernels < 2 * sum(report.ranks[0].median_step.by_family.values())


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
    assert "90 % interval" in second and "ms with the same host; 100% of kernel time is modelled" in second
    assert not any("off by" in line for line in out)


@pytest.mark.parametrize(
    ("trace", "platform", "low"), [("resnet50_t4_b", "t4", True), ("sam_false_a100", "a100-40gb", False)]
)
def test_a_low_clock_is_told_by_what_follows_it(public, capsys, trace, platform, low):
    assert main(["trace", str(public / f"{trace}.json.gz"), "--on", platform]) == 0
    assert ("the GPU's clock was probably low" in capsys.readouterr().out) == low


def test_a_step_of_which_nothing_is_modelled_is_no_test_of_the_prediction(public, capsys):
    assert main(["trace", str(public / "vgg16_t4.json.gz"), "--on", "t4"]) == 0
    out = capsys.readouterr().out
    assert "No prediction on t4 (host time of this trace): next to no kernel says what it worked on" in out
    assert "off by" not in out


def test_a_trace_that_names_no_gpu_has_an_error_only_if_it_ran_there(public, tmp_path, capsys):
    path = damage(public / "resnet50_t4_b.json.gz", tmp_path / "t.json", list)
    document = json.loads(path.read_text())
    document["deviceProperties"] = []
    path.write_text(json.dumps(document))
    assert main(["trace", str(path), "--on", "v100"]) == 0
    assert "if they ran there: the trace names no GPU" in capsys.readouterr().out


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


def test_a_profile_of_a_traced_trace_counts_the_tracer_once(tmp_path):
    """A gap of 80 us with 40 begins and ends of calls in it is a usual one of 25 us."""
    traced = [event("python_function", f"f{n}", 110 + n, 0.5) for n in range(20)]
    events = step(op("aten::mm", 10, 90, [[8, 8]]), launch(1, 20), kernel(1, 40, 30), *traced,
                  op("aten::mm", 180, 90, [[8, 8]]), launch(2, 190), kernel(2, 210, 30))  # fmt: skip
    (gap,) = [d for key, d in measure_overheads(linked(tmp_path, events), ProfilerCost(0.0, 0.0)).table.items()
              if key == ("T1", "python")]  # fmt: skip
    assert gap.total == pytest.approx(80e-6 / (0.4 + 0.067 * 40))
