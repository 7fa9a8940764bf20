"""Promise: a file that is damaged, hostile or meant for something else is one line of bad input, never a traceback."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace

import pytest

from traincast.app.cli.main import main
from traincast.ir.file import save_workload
from traincast.models.catalog import load_model

TRIES = 17
"""Files; `tests/fuzz` tries more of every format."""
PREDICT = ["predict", "dlrm-default", "--on"]
SWEEP = {
    "workload": "dlrm-default",
    "axes": {"batch-size": [1]},
    "pareto": [],
    "rows": [],
    "failures": [],
    "points": 0,
    "failed": 0,
}


def _reject(arguments, capsys) -> str:
    """The one line that a command ends with."""
    assert main([str(argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert "internal error" not in err
    assert "Traceback" not in err
    return err


def test_a_platform_that_refines_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.toml").write_text('refines = "loop.toml"\nsource = "x"\n[corrections]\ngemm = 1.1\n')
    assert "name a built-in platform" in _reject([*PREDICT, "loop.toml"], capsys)


@pytest.mark.parametrize("formula", ["min(1)", "max(2)", "sqrt(1, 2)", "ceil()", "min()"])
def test_a_formula_with_the_wrong_number_of_arguments(formula, tmp_path, capsys):
    (tmp_path / "costs.toml").write_text(f'["aten::relu_"]\nseconds = "{formula}"\n')
    assert formula in _reject([*PREDICT, "v100", "--costs", tmp_path / "costs.toml"], capsys)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"axes": {"batch-size": 3}}, "axes have to be lists"),
        ({"axes": [1]}, "axes have to be lists"),
        ({"points": "many"}, "have to be integers"),
        ({"rows": [{"us_per_sample": "1"}]}, "a row needs numbers"),
    ],
)
def test_a_sweep_with_odd_fields(changed, told, tmp_path, capsys):
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP | changed))
    assert told in _reject(["report", tmp_path / "sweep.json", "-o", tmp_path / "x.html"], capsys)


def test_half_a_character_in_a_sweep_is_written_as_a_question_mark(tmp_path, capsys):
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP | {"workload": "a\ud800b"}))
    assert main(["report", str(tmp_path / "sweep.json"), "-o", str(tmp_path / "x.html")]) == 0
    assert "Sweep of a?b" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_zeros_packed_as_a_chakra_trace_are_refused_after_a_few_bytes(tmp_path, capsys):
    path = tmp_path / "zeros.et.gz"
    path.write_bytes(gzip.compress(bytes(1 << 22)))
    assert "make no sense" in _reject(["trace", path], capsys)


@pytest.mark.parametrize("kind", ["predict", "trace", "shard"])
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(kind, tmp_path, capsys):
    pipe = tmp_path / ("x.yaml" if kind != "trace" else "x.json")
    os.mkfifo(pipe)
    _reject([kind, pipe, "--on", "dgx-a100"], capsys)


def test_a_damaged_parquet_file_prints_nothing_of_the_reader(tmp_path, capfd):
    polars = pytest.importorskip("polars")
    path = tmp_path / "tables.parquet"
    polars.DataFrame({"name": ["a"] * 50, "rows": list(range(1, 51)), "dim": [64] * 50}).write_parquet(path)
    data = bytearray(path.read_bytes())
    del data[20 : len(data) // 2]  # the footer points behind the end
    path.write_bytes(bytes(data))
    assert main(["shard", str(path), "--on", "dgx-a100", "--gpus", "2"]) == 2
    err = capfd.readouterr().err
    assert "panicked" not in err
    assert len(err.strip().splitlines()) == 1


def test_a_workload_whose_storage_is_used_before_it_is_allocated(tmp_path, capsys):
    workload = load_model("dlrm-v2")
    program = workload.programs[0]
    c = program.columns
    made = c.tensor_storage[c.output_tensor].tolist()
    storage = next(one for one in made if 0 <= c.storage_alloc[one] < c.storage_free[one] - 1)
    late = c.storage_alloc.copy()
    late[storage] = c.storage_free[storage]
    changed = replace(program, columns=replace(c, storage_alloc=late))
    save_workload(replace(workload, programs=(changed,)), tmp_path / "late.tc")
    words = ["predict", tmp_path / "late.tc", "--on", "dgx-a100", "--gpus", "2"]
    assert f"storage {storage} of the workload is used before it is allocated" in _reject(words, capsys)
