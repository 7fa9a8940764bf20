"""What a trace cannot tell is said."""

from __future__ import annotations

import json
import re

import pytest

from tests.traces.timelines import event, kernel, launch, op, small_events, step, write_trace
from traincast.traces.replay.analysis import analyse_traces, note_missing_ranks


def notes(path, *others):
    return " ".join(analyse_traces([path, *others]).ranks[0].notes)


def test_a_run_without_kernels_says_so_and_names_what_was_not_understood(tmp_path):
    events = step(event("cpu_op", "aten::mm", 10, 50), event("glow_runtime", "mm", 30, 20))
    said = notes(write_trace(tmp_path / "t.json", events))
    assert "no kernels, copies or memsets" in said
    assert "1 of category 'glow_runtime'" in said


def test_rows_of_mtia_are_a_device_and_categories_that_are_not_read_are_named(tmp_path):
    events = step(event("mtia_ccp_events", "mm", 30, 200, tid=4), event("glow_runtime", "counters", 30, 20))
    report = analyse_traces([write_trace(tmp_path / "t.json", events)]).ranks[0]
    assert report.steps[0].active == pytest.approx(200e-6)
    assert "events that are not read: 1 of 'glow_runtime'" in " ".join(report.notes)


def test_two_devices_in_one_process_are_told_apart(tmp_path):
    second = kernel(2, 100, 200)
    second["args"]["device"] = 1
    events = step(launch(1, 10), kernel(1, 20, 100), launch(2, 30), second)
    said = notes(write_trace(tmp_path / "t.json", events))
    assert "kernels of 2 devices" in said
    assert "device 0 10%, device 1 20%" in said


def test_kernels_without_any_launch_count_to_the_step_they_ran_in(tmp_path):
    events = step(event("cpu_op", "aten::mm", 10, 50), kernel(1, 20, 100), kernel(2, 200, 300))
    report = analyse_traces([write_trace(tmp_path / "t.json", events)]).ranks[0]
    assert "no launch of a kernel (no runtime calls with correlations) is in the trace" in " ".join(report.notes)
    assert (report.steps[0].kernels, report.steps[0].by_family) == (2, {"gemm": 400e-6})
    assert (report.steps[0].host_bound, report.steps[0].not_recorded) == (0.0, report.steps[0].idle)


def test_steps_told_by_an_optimizer_or_an_annotation_are_said(tmp_path):
    marks = [event("user_annotation", "Optimizer.step#Adam.step", start, 20) for start in (100, 400, 800)]
    said = notes(write_trace(tmp_path / "t.json", [launch(1, 110), kernel(1, 120, 100), *marks]))
    assert "steps begin at 'Optimizer.step#Adam.step'" in said


def execution(tmp_path, shape):
    nodes = [
        {"id": 1, "name": "[pytorch|profiler|execution_graph|thread]", "parent": 1, "inputs": [], "outputs": []},
        *(
            {
                "id": number, "rf_id": number, "name": name, "parent": 1, "fw_parent": 0, "seq_id": -1, "scope": 0,
                "tid": 1, "fw_tid": 0, "op_schema": "", "inputs": [[1, 1, 0, 1, 4, "cuda:0"]] * 2,
                "input_shapes": [list(shape)] * 2, "input_types": ["Tensor(float)"] * 2,
                "outputs": [], "output_shapes": [], "output_types": [],
            }
            for number, name in ((2, "aten::mm"), (3, "aten::view"), (4, "aten::add"))
        ),
    ]  # fmt: skip
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.0.1", "pid": 1, "time": "", "start_ts": 0, "nodes": nodes}))
    return path


def test_an_execution_trace_of_another_run_is_noticed_and_not_used(tmp_path):
    path = write_trace(tmp_path / "t.json", small_events())
    report = analyse_traces([path, execution(tmp_path, (32, 32))]).ranks[0]
    assert "seems to be of another run" in " ".join(report.notes)
    assert report.execution is None


def test_an_execution_trace_of_few_of_the_ops_is_noticed(tmp_path):
    others = [op(f"aten::op{number}", 700 + 10 * number, 5, [[4]]) for number in range(8)]
    path = write_trace(tmp_path / "t.json", [*small_events(), *others])
    assert "of the ops are in it" in notes(path, execution(tmp_path, (64, 64)))


def test_a_last_step_that_had_only_begun_is_left_out(tmp_path):
    marks = [event("user_annotation", f"ProfilerStep#{n}", 1000 * n, 1000 if n < 4 else 30) for n in (2, 3, 4)]
    events = [*marks, *(e for n in (2, 3) for e in (launch(n, 1000 * n + 10), kernel(n, 1000 * n + 20, 400)))]
    report = analyse_traces([write_trace(tmp_path / "t.json", events)]).ranks[0]

    assert [step.number for step in report.steps] == [2, 3]
    assert report.path.steady == pytest.approx(report.steps[0].step)
    assert "stopped when step 4 had begun" in " ".join(report.notes)


def test_graphs_whose_nodes_were_not_recorded_are_said(tmp_path):
    events = step(launch(1, 10), kernel(1, 20, 100), launch(2, 200, 30, name="cudaGraphLaunch"))
    assert "1 of 1 launches of graphs have no kernels" in notes(write_trace(tmp_path / "t.json", events))


def test_kernels_that_begin_before_their_calls_are_said(tmp_path):
    events = step(launch(1, 100), kernel(1, 40, 100), launch(2, 300), kernel(2, 260, 100))
    said = notes(write_trace(tmp_path / "t.json", events))
    assert "differ by 59.8 us or more (kernels begin before the calls that launched them): kernels are put that" in said
    assert "begin before the call" not in notes(write_trace(tmp_path / "t.json", small_events()))


def _make_steps(count, device_us):
    """Steps that the host passes every 100 us, with a kernel each that the device runs one after the other."""
    events = []
    for number in range(count):
        start = 100 * number
        events += [event("user_annotation", f"ProfilerStep#{number}", start, 100), launch(number + 1, start + 10)]
        begin = 20 + device_us * number if device_us > 100 else start + 20
        events.append(kernel(number + 1, begin, device_us))
    return events


def test_a_host_that_runs_ahead_does_not_set_the_length_of_steps(tmp_path):
    report = analyse_traces([write_trace(tmp_path / "t.json", _make_steps(5, 2000))]).ranks[0]
    assert "the host runs ahead of the device" in " ".join(report.notes)
    assert report.median_step.step == pytest.approx(2000e-6)
    assert report.median_step.active == pytest.approx(2000e-6)


def test_a_host_that_keeps_pace_does(tmp_path):
    report = analyse_traces([write_trace(tmp_path / "t.json", _make_steps(5, 60))]).ranks[0]
    assert "runs ahead" not in " ".join(report.notes)
    assert report.median_step.step == pytest.approx(100e-6)


def test_launches_without_kernels_are_said(tmp_path):
    events = _make_steps(4, 60)
    kept = [one for one in events if one["cat"] != "kernel" or one["args"]["correlation"] == 1]
    assert "have no kernel in the trace" not in notes(write_trace(tmp_path / "t.json", events))
    assert "3 of 4 launches have no kernel in the trace" in notes(write_trace(tmp_path / "lost.json", kept))


def test_layers_that_come_again_in_a_small_part_of_a_trace_are_no_steps(tmp_path):
    names = ("gemm", "softmax", "layer_norm", "gelu", "copy")
    events = [event("cpu_op", "aten::load", 0, 50_000)]
    for place in range(45):
        events += [
            launch(place + 1, 50_000 + 20 * place),
            kernel(place + 1, 50_010 + 20 * place, 10, name=names[place % 5]),
        ]
    report = analyse_traces([write_trace(tmp_path / "t.json", events)]).ranks[0]
    assert "comes again" in " ".join(report.notes) and "the whole trace counts as one step" in " ".join(report.notes)
    assert len(report.steps) == 1


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([(0, 8), (1, 8), (7, 8)], r"5 ranks of the run are missing \(2, 3, 4, 5, 6\)"),
        ([(0, 2), (1, 4)], "of worlds of 2, 4 ranks: of several runs"),
    ],
)
def test_ranks_that_were_not_given_are_named(ranks, told):
    assert re.search(told, note_missing_ranks(ranks)[0])


@pytest.mark.parametrize("ranks", [[(0, 2), (1, 2)], [(0, None), (1, None)], [(0, 1)]])
def test_whole_runs_miss_nobody(ranks):
    assert not note_missing_ranks(ranks)


def test_a_single_rank_of_several_says_that_its_collectives_are_waits_too():
    assert "one rank of 8" in note_missing_ranks([(3, 8)])[0]
