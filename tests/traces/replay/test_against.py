"""A traced run held against the saved prediction of it."""

from __future__ import annotations

import json

import pytest

from tests.traces.timelines import event, kernel, launch, op, step, write_trace
from traincast.app.api import compare_traces, predict
from traincast.app.cli.main import main


@pytest.fixture(scope="module")
def predicted():
    return predict("resnet50", on="v100", batch_size=8).to_dict()


def save(folder, predicted, **changed):
    path = folder / "predicted.json"
    path.write_text(json.dumps(predicted | changed))
    return path


def node(name, start, length, tid, forward_thread, sequence=7):
    return event("cpu_op", name, start, length, tid, **{"Fwd thread id": forward_thread, "Sequence number": sequence})


def write_run(folder, *, named=True):
    """A module's product, forward on thread 1 and backward on thread 2, and an optimizer's kernel."""
    events = step(
        *([event("user_annotation", "Net.layers.3.fc", 10, 90)] if named else []),
        node("aten::mm", 20, 60, 1, 0), op("aten::mm", 21, 58, [[64, 64], [64, 64]]), launch(1, 30),
        kernel(1, 60, 100, name="sgemm"),
        node("MmBackward0", 200, 100, 2, 1), op("aten::mm", 210, 80, [[64, 64], [64, 64]], tid=2),
        launch(2, 220, tid=2), kernel(2, 250, 200, name="sgemm"),
        event("user_annotation", "Optimizer.step#SGD.step", 500, 100), op("aten::add_", 520, 50, [[64], [64]]),
        launch(3, 530), kernel(3, 560, 40, name="elementwise_kernel"),
    )  # fmt: skip
    return write_trace(folder / "run.json", events)


def test_modules_and_ops_are_matched_by_name_and_backward_counts_to_its_module(tmp_path, predicted):
    saved = save(tmp_path, predicted, by_module={"Net.layers.*.fc": 0.25, "(optimizer)": 0.04, "Net.head": 0.5},
                 by_op={"aten::mm": 0.25, "aten::relu": 0.1})  # fmt: skip
    compared = compare_traces(saved, write_run(tmp_path))
    modules = {row.name: (1e3 * row.before, 1e3 * row.after) for row in compared.modules}
    assert modules["Net.layers.*.fc"] == pytest.approx((0.25, 0.3))
    assert modules["(optimizer)"] == pytest.approx((0.04, 0.04))
    assert modules["Net.head"] == pytest.approx((0.5, 0.0))
    ops = {row.name: (1e3 * row.before, 1e3 * row.after) for row in compared.ops}
    assert ops == {"aten::mm": pytest.approx((0.25, 0.3)), "aten::add_": pytest.approx((0, 0.04)),
                   "aten::relu": pytest.approx((0.1, 0))}  # fmt: skip


def test_the_first_line_says_whether_the_interval_holds_the_step(tmp_path, predicted, capsys):
    trace = write_run(tmp_path, named=False)
    for interval, word in (([0.9, 1.1], "inside"), ([0.1, 0.9], "outside")):
        saved = save(tmp_path, predicted, iteration_ms=0.8, interval_ms=interval)
        assert main(["trace", str(saved), str(trace), "--compare"]) == 0
        out = capsys.readouterr().out
        first = out.splitlines()[0]
        assert first.startswith(
            "run.json against the prediction of resnet50 on v100: 1.00 ms per step, 0.200 ms longer"
        )
        assert f"{word} the 90 % interval" in first
    assert "record it with `traincast.profile(modules=model)`" in out
    assert "'traincast fit' refines a GPU from run.json" in out


@pytest.mark.parametrize(
    ("changed", "message"), [({"schema": 99}, "has schema 99"), ({"iteration_ms": "x"}, "is no prediction")]
)
def test_what_is_no_prediction_of_ours_is_refused(tmp_path, predicted, capsys, changed, message):
    saved = save(tmp_path, predicted, **changed)
    assert main(["trace", str(saved), str(write_run(tmp_path)), "--compare"]) == 2
    assert message in capsys.readouterr().err


def test_a_prediction_as_the_second_file_is_refused(tmp_path, predicted, capsys):
    assert main(["trace", str(write_run(tmp_path)), str(save(tmp_path, predicted)), "--compare"]) == 2
    assert "give it first" in capsys.readouterr().err


def test_a_prediction_with_broken_text_is_refused(tmp_path, predicted, capsys):
    saved = save(tmp_path, predicted)
    saved.write_bytes(saved.read_bytes().replace(b'"resnet50"', b'"resnet\xe5"', 1))
    assert main(["trace", str(saved), str(write_run(tmp_path)), "--compare"]) == 2
    assert "is no prediction" in capsys.readouterr().err
