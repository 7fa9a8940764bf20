"""Sweeps: points, journals, pictures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import polars as pl
import pytest

import traincast
from traincast.app.cli.main import main
from traincast.app.report.whatif import format_sweep
from traincast.planner.what_if.sweeps.points import Grid, make_grid, read_varied_values
from traincast.planner.what_if.sweeps.result import find_pareto_rows
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import read_document

VARY = {"on": ["v100", "p100"], "batch-size": ["256:1024:x2"], "apply": ["none", "cuda-graph"]}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    result = traincast.sweep(
        "dlrm-ddp", on="v100", vary=VARY, out=folder / "s.csv", image=folder / "s.svg",
        price={"v100": 3.0, "p100": 1.0}, processes=1,
    )  # fmt: skip
    return result, folder


def test_every_point_is_what_predict_says(swept):
    result, _ = swept
    assert len(result.rows) == 12 and not result.failed
    for row in result.rows[::5]:
        alone = traincast.predict(
            "dlrm-ddp", on=row["on"], batch_size=int(row["batch-size"]), cuda_graph=row["apply"] == "cuda-graph"
        )
        assert row["iteration_ms"] == pytest.approx(1e3 * alone.iteration, rel=1e-12)
        assert row["high_ms"] == pytest.approx(1e3 * alone.interval[1], rel=1e-12)
        assert row["memory_gb"] == pytest.approx(alone.needed_bytes / 1e9, rel=1e-12)
        assert row["device_active_ms"] == pytest.approx(1e3 * alone.device_active, rel=1e-12)


def test_prices_are_those_of_the_platform(swept):
    rows = [row for row in swept[0].rows if row["batch-size"] == 512 and row["apply"] == "none"]
    for row in rows:
        dollars = {"v100": 3.0, "p100": 1.0}[row["on"]] * row["gpu_hours_per_million_samples"]
        assert row["dollars_per_million_samples"] == pytest.approx(dollars)


def test_the_files_hold_all_rows(swept, tmp_path):
    result, folder = swept
    table = pl.read_csv(folder / "s.csv")
    assert table.height == 12 and table["iteration_ms"].to_list() == [row["iteration_ms"] for row in result.rows]
    assert not list(folder.glob("*.points"))
    assert ElementTree.parse(folder / "s.svg").getroot().tag.endswith("svg")
    traincast.sweep("dlrm-ddp", on="v100", vary={"batch-size": [256, 512]}, out=tmp_path / "s.parquet", processes=1)
    assert pl.read_parquet(tmp_path / "s.parquet")["batch-size"].to_list() == [256, 512]


def test_no_point_of_the_pareto_table_is_beaten(swept):
    result, _ = swept
    goals = [(r["us_per_sample"], r["dollars_per_million_samples"], r["memory_gb"]) for r in result.rows]
    best = [(r["us_per_sample"], r["dollars_per_million_samples"], r["memory_gb"]) for r in result.pareto]
    assert best
    for mine in goals:
        beaten = any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in goals)
        assert beaten == (mine not in best)
    assert "p100" in format_sweep(result)


def test_a_point_that_fails_is_listed_and_stops_no_other():
    result = traincast.sweep("dlrm-ddp", on="v100", vary={"dtype": ["fp32", "fp8"], "batch-size": [512]}, processes=1)
    (failed,) = result.failed
    assert failed["dtype"] == "fp8" and "described Transformers" in failed["error"]
    assert "failed: dtype=fp8" in format_sweep(result)
    assert len(result.pareto) == 1


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    # given a sweep that was interrupted after some points
    out = tmp_path / "s.csv"
    vary = {"batch-size": list(range(100, 148))}
    heard = []

    def interrupt(fraction):
        heard.append(fraction)
        if fraction >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        traincast.sweep("dlrm-ddp", on="v100", vary=vary, out=out, processes=1, progress=interrupt)
    assert not out.exists()

    # and whose last line was cut short
    journal = tmp_path / "s.csv.points"
    with journal.open("a") as file:
        file.write('{"point":47,"ro')

    # when it is asked for again
    result = traincast.sweep("dlrm-ddp", on="v100", vary=vary, out=out, processes=1)

    # then it computes the rest only, and the rows are those of a sweep that was never interrupted
    assert result.resumed == 32
    whole = traincast.sweep("dlrm-ddp", on="v100", vary=vary, processes=1)
    assert result.rows == whole.rows
    assert not journal.exists()


def test_the_journal_of_another_sweep_is_not_taken_for_this_one(tmp_path):
    out = tmp_path / "s.csv"
    (tmp_path / "s.csv.points").write_text(json.dumps({"traincast_sweep": 1, "sweep": "other", "points": 2}) + "\n")
    with pytest.raises(TraincastError, match="another sweep"):
        traincast.sweep("dlrm-ddp", on="v100", vary={"batch-size": [1, 2]}, out=out, processes=1)


def test_a_killed_sweep_loses_at_most_the_points_in_flight(tmp_path):
    # given a sweep in a process of its own
    out = tmp_path / "s.csv"
    command = [sys.executable, "-m", "traincast", "sweep", "dlrm-ddp", "--on", "v100", "--vary",
               "batch-size=100:20000:1", "--out", str(out), "--processes", "2"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    journal = tmp_path / "s.csv.points"
    for _ in range(6000):
        if journal.exists() and journal.stat().st_size > 40_000:
            break
        time.sleep(0.05)

    # when all of it is killed
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    # then its points are in the journal, whole lines all but perhaps the last
    lines = journal.read_bytes().split(b"\n")
    assert len([json.loads(line) for line in lines[:-1]]) > 64
    assert not out.exists()


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ({"batch-size": ["1:1000:1"], "gpus": ["1:1000:1"], "clock-mhz": ["1:1000:1"]}, "1,000,000,000 points"),
        ({"batch-size": ["1:100000:1"], "gpus": ["1:20:1"]}, "at most 50,000 values"),
        ({"batch-size": ["1:100000000:1"]}, "at most 100,000"),
        ({"batchsize": ["1"]}, "Did you mean batch-size"),
        ({"apply": ["none", "cuda-grph"]}, "cuda-graph"),
        ({"batch-size": ["8:4:1"]}, "no range"),
        ({"batch-size": [f"1:{'9' * 400}:x2"]}, "no range"),
        ({"batch-size": [f"1:{'9' * 5000}:1"]}, "no range"),
        ({"batch-size": ["1:1000:1"], "gpus": ["1:1000:1"], "pooling": ["1:1000:1"]}, "at most 100 values of 'gpus'"),
        ({"apply": ["none", "compile+fuse-elementwise", "cuda-graph"]}, "exclude each other"),
        ({}, "something to vary"),
    ],
)
def test_bad_sweeps_are_refused_with_what_would_work(vary, said):
    with pytest.raises(TraincastError, match=said):
        make_grid(vary)


SWEEP = """
workload: {workload}
on: v100
vary: {{on: [v100, p100], batch-size: "64:128:x2", overlap: [on]}}
price: {price}
options: {{mode: inference}}
"""


def test_a_sweep_in_yaml_is_one_of_options_and_options_come_first(tmp_path, capsys):
    file = tmp_path / "s.yaml"
    file.write_text(SWEEP.format(workload="dlrm-ddp", price="{v100: 1.0, p100: 0.5}"))
    assert main(["sweep", "--file", str(file), "--processes", "1", "--json"]) == 0
    asked = {"on": ["v100", "p100"], "batch-size": ["64:128:x2"], "overlap": ["on"]}
    price = {"v100": 1.0, "p100": 0.5}
    wanted = traincast.sweep("dlrm-ddp", on="v100", vary=asked, price=price, processes=1, mode="inference")
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row.pop("prediction")["iteration_ms"] == row["iteration_ms"] for row in rows)
    assert rows == wanted.rows
    assert main(["sweep", "--file", str(file), "--processes", "1", "--json", "--mode", "training"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["iteration_ms"] > wanted.rows[0]["iteration_ms"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("options: {gpus: two}", "'two': give an integer"),
        ("options: {layout: 3}", "unknown option 'layout'"),
        ("options: {compiled: 1}", "true or false"),
        ("options: [1]", "fields of the scenario by name"),
        ("workload: [1]", "give text"),
        ("vary: {batch-size: {a: 1}}", "numbers or names"),
        ("vary: 5", "has values by edit"),
    ],
)
def test_bad_files_of_sweeps_say_what_is_wrong(tmp_path, capsys, text, said):
    known = {"workload": "dlrm-ddp", "on": "v100", "vary": "{batch-size: [64]}"}
    name, _, value = text.partition(": ")
    file = tmp_path / "s.yaml"
    file.write_text("".join(f"{key}: {content}\n" for key, content in {**known, name: value}.items()))
    assert main(["sweep", "--file", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_point_without_a_price_is_not_ranked_among_those_with_one():
    result = traincast.sweep("dlrm-ddp", on="v100", vary={"on": ["v100", "p100"]}, price={"v100": 1.0}, processes=1)
    assert [row["on"] for row in result.failed] == ["p100"]
    assert "none for p100" in result.failed[0]["error"]


def test_a_sweep_does_not_go_on_from_that_of_another_file_of_the_same_name(tmp_path):
    # given a sweep of a described model that was stopped in the middle
    model, out = tmp_path / "m.yaml", tmp_path / "s.csv"
    model.write_text(MODEL.format(width=64))

    def stop(done):
        raise KeyboardInterrupt

    asked = {"on": "v100", "vary": {"on": ["v100", "p100"]}, "out": out, "processes": 1}
    with pytest.raises(KeyboardInterrupt):
        traincast.sweep(str(model), progress=stop, **asked)

    # when the model is another one
    model.write_text(MODEL.format(width=128))

    # then its points are not mixed with those of the old one
    with pytest.raises(TraincastError, match="another sweep"):
        traincast.sweep(str(model), **asked)


MODEL = """
bottom_mlp: [13, 64, {width}]
top_mlp: [64, 1]
embedding_dim: {width}
rows_per_table: [1000, 2000]
lookups_per_table: 1
"""


def test_whole_numbers_of_yaml_and_python_are_whole(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("workload: dlrm-ddp\non: v100\nvary: {batch-size: [1.0e+3, 2000.0]}\n")
    assert make_grid(read_varied_values(read_document(file)["vary"], "s.yaml")).axes == (
        ("batch-size", ("1000", "2000")),
    )
    assert not traincast.sweep("dlrm-ddp", on="v100", vary={"batch-size": [1e3]}, processes=1).failed


def test_a_grid_is_the_product_of_its_axes():
    grid = Grid(axes=(("on", ("a", "b")), ("gpus", ("1", "2", "4"))))
    assert grid.points == len(list(grid)) == 6


def test_pareto_of_equal_points_keeps_one():
    row = {"us_per_sample": 1.0, "dollars_per_million_samples": 1.0, "memory_gb": 1.0}
    assert len(find_pareto_rows([row, dict(row)])) == 1
