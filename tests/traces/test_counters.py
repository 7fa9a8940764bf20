"""Traces in which CUPTI wrote hardware counters in place of kernels, as Kineto writes them."""

from __future__ import annotations

import json

import pytest

from tests.traces.timelines import event, launch, op, step
from traincast.app.cli.main import main
from traincast.traces.counters import make_counter_rows
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace

FMA, ADD = (f"smsp__sass_thread_inst_executed_op_{kind}_pred_on.sum" for kind in ("ffma", "fadd"))
TENSOR = "sm__inst_executed_pipe_tensor.sum"


def counted(name, start, **values):
    return event("cuda_profiler_range", name, start, 10) | {"args": {FMA: 0, ADD: 0, **values}}


def write(tmp_path, ranges):
    """A step that multiplies twice and adds once; its kernels are only counted."""
    events = step(
        op("aten::mm", 100, 60, [[64, 64], [64, 64]]), launch(1, 120),
        op("aten::mm", 200, 60, [[64, 64], [64, 64]]), launch(2, 220),
        op("aten::add", 300, 40, [[64], [64]]), launch(3, 310, name="cuLaunchKernel"),
        *ranges,
    )  # fmt: skip
    path = tmp_path / "counted.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def product(start):
    return counted("volta_sgemm", start, **{FMA: 64**3, ADD: 10.0, TENSOR: 0})


def test_counters_belong_to_the_ops_that_launched_their_kernels_in_order(tmp_path):
    ranges = [counted("vectorized_add", 90, **{ADD: 64}), product(80), product(70)]
    rows = make_counter_rows(link_trace(read_kineto(write(tmp_path, ranges))))
    assert [(row.op, row.kernel, row.count, row.flops) for row in rows] == [
        ("aten::mm", "volta_sgemm", 2, 2 * (2 * 64**3 + 10)),
        ("aten::add", "vectorized_add", 1, 64),
    ]
    assert rows[0].to_dict()[FMA] == 2 * 64**3
    assert rows[1].to_dict()[TENSOR] == 0, "every row has every counter"


def test_where_launches_and_ranges_differ_in_number_no_op_is_guessed(tmp_path, capsys):
    path = write(tmp_path, [product(70), product(80)])
    (row,) = make_counter_rows(link_trace(read_kineto(path)))
    assert (row.op, row.count) == ("", 2)
    assert main(["trace", str(path), "-v"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1.00 ms per step: it has no kernels, so how busy")
    assert "hardware counters of 2 ranges" in out
    assert "there are 3 launches, so their ops are not known" in out
    assert "Hardware counters" in out


@pytest.mark.parametrize("args", [None, [], {FMA: "many"}, {FMA: True}, {"__": None}, {"a" * 500 + "__b": 1e400}])
def test_senseless_counters_are_left_out(tmp_path, args):
    path = write(tmp_path, [event("cuda_profiler_range", "volta_sgemm", 70, 10) | {"args": args}])
    (row,) = make_counter_rows(link_trace(read_kineto(path)))
    assert (row.kernel, row.count, row.flops) == ("volta_sgemm", 1, None)
    assert all(len(name) <= 120 for name in row.values)


def test_counters_are_in_the_json(tmp_path, capsys):
    path = write(tmp_path, [counted("vectorized_add", 90, **{ADD: 64}), product(80), product(70)])
    assert main(["trace", str(path), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["profile"]["counters"][0]["op"] == "aten::mm"
    assert rank["profile"]["counters"][0][FMA] == 2 * 64**3
