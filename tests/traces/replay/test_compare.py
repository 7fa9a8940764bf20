"""Two traced runs side by side."""

from __future__ import annotations

import pytest

from tests.traces.timelines import event, kernel, launch, op, step, write_trace
from traincast.app.cli.main import main
from traincast.app.report.compared import format_comparison
from traincast.traces.replay.analysis import analyse_traces
from traincast.traces.replay.compare import compare_reports, format_shapes


def run(folder, name, product_us, width=64, host_us=20):
    events = step(
        op("aten::mm", 100, host_us, [[64, width], [width, 64]]), launch(1, 105, 5),
        kernel(1, 120, product_us, name="sgemm"),
        op("aten::add", 200, 20, [[64], [64]]), launch(2, 205, 5), kernel(2, 700, 50, name="elementwise_kernel"),
        length=1000 + product_us,
    )  # fmt: skip
    return write_trace(folder / name, events)


def compared(before, after):
    return compare_reports(*(analyse_traces([path]) for path in (before, after)))


def test_the_op_that_got_slower_explains_the_difference(tmp_path):
    comparison = compared(run(tmp_path, "a.json", 100), run(tmp_path, "b.json", 300))
    first = comparison.ops[0]
    assert (first.name, first.shapes, first.share) == ("aten::mm", "64x64 64x64", pytest.approx(1.0))
    assert first.change == pytest.approx(200e-6)
    assert comparison.step == pytest.approx((1100e-6, 1300e-6))
    assert sum(part.change for part in comparison.parts) == pytest.approx(200e-6)
    assert next(part for part in comparison.parts if part.name == "compute").share == pytest.approx(1.0)


def test_an_op_of_another_shape_is_another_op(tmp_path):
    comparison = compared(run(tmp_path, "a.json", 100), run(tmp_path, "b.json", 100, width=128))
    changed = {row.shapes: (row.count_before, row.count_after) for row in comparison.ops if row.name == "aten::mm"}
    assert changed == {"64x64 64x64": (1, 0), "64x128 128x64": (0, 1)}


def test_a_run_against_itself_differs_in_nothing(tmp_path):
    path = run(tmp_path, "a.json", 100)
    comparison = compared(path, path)
    assert all(row.change == 0 and row.share is None for table in (comparison.parts, comparison.ops) for row in table)
    assert "0.000 ms longer" in format_comparison(comparison, 5)


def test_host_time_is_compared_too(tmp_path):
    comparison = compared(run(tmp_path, "a.json", 100), run(tmp_path, "b.json", 100, host_us=60))
    assert comparison.host[0].name == "aten::mm"
    assert comparison.host[0].change == pytest.approx(40e-6)


def test_two_traces_on_the_command_line(tmp_path, capsys):
    paths = [str(run(tmp_path, "a.json", 100)), str(run(tmp_path, "b.json", 300))]
    tables = tmp_path / "tables"
    tables.mkdir()
    assert main(["trace", *paths, "--compare", "--tables-out", str(tables)]) == 0
    assert "b.json against a.json: 1.30 ms per step, 0.200 ms longer (+18.2%)" in capsys.readouterr().out
    assert (tables / "ops.csv").read_text().splitlines()[1].startswith("aten::mm,64x64 64x64,1.0,1.0,0.1,0.3")


@pytest.mark.parametrize(
    ("extra", "message"),
    [([], "--compare takes two traces"), (["b.json", "--on", "v100"], "--on is about one run")],
)
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, monkeypatch, extra, message):
    monkeypatch.chdir(tmp_path)
    run(tmp_path, "a.json", 100)
    run(tmp_path, "b.json", 100)
    assert main(["trace", "a.json", *extra, "--compare"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("details", [b"", b"[1]", b"{", b'{"dims":7}', b'{"dims":[["a"]]}'])
def test_recorded_shapes_that_make_no_sense_are_no_shapes(details):
    assert format_shapes(details) == ""


def test_kernels_outside_of_any_op_go_by_their_own_name(tmp_path):
    path = write_trace(tmp_path / "a.json", step(launch(1, 10), kernel(1, 20, 30), event("cpu_op", "aten::view", 1, 2)))
    (row,) = compared(path, path).ops
    assert row.name == "gemm"


def test_the_call_tree_tells_the_same_op_under_two_callers_apart(tmp_path):
    def make(name, inner_us):
        events = step(
            op("aten::linear", 10, 60, [[8, 8]]), op("aten::mm", 12, 50, [[8, 8]]), launch(1, 20),
            kernel(1, 40, 100), op("aten::mm", 200, 50, [[8, 8]]), launch(2, 210), kernel(2, 230, inner_us),
        )  # fmt: skip
        return analyse_traces([write_trace(tmp_path / name, events)])

    changes = {c.name: 1e6 * c.change for c in compare_reports(make("a.json", 50), make("b.json", 80)).calls}
    assert changes == {"aten::mm": pytest.approx(30), "aten::linear > aten::mm": pytest.approx(0)}
