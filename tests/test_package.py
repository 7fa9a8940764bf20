"""Promises about the package as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.app.cli.registry import list_commands

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(traincast.__file__).parent


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def test_predicting_imports_neither_torch_nor_the_fitting_libraries():
    code = (
        "import sys, traincast\n"
        "traincast.predict('bert-large', on='a100-80gb', batch_size=3, seq_len=100)\n"
        "print([name for name in ('torch', 'polars', 'sklearn', 'scipy') if name in sys.modules])"
    )
    assert run("-c", code).stdout.strip() == "[]"


def test_command_line_runs_as_a_module_and_prints_one_json_document():
    done = run("-m", "traincast", "predict", "dlrm-default", "--on", "v100", "--json")

    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["workload"] == "dlrm-default"


def test_every_verb_has_help_and_json(capsys):
    for command in list_commands():
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0, command
        assert "--json" in capsys.readouterr().out, command


def test_shipped_data_stays_small():
    shipped = [path for path in PACKAGE.rglob("*") if path.suffix in (".npz", ".json", ".tc", ".toml")]

    assert sum(path.stat().st_size for path in shipped) < 25e6


def test_benchmarks_of_many_ranks_report_ratios():
    done = run("benchmarks/ranks.py", "--quick", "--json")

    rows = json.loads(done.stdout)
    assert len(rows) == 7
    assert all(row["ratio"] > 0 for row in rows), "what it is says something of the machine as well"


def test_benchmarks_report_ratios():
    done = run("benchmarks/speed.py", "--quick", "--json", "cold", "warm", "rebatch")

    rows = json.loads(done.stdout)
    assert [set(row) for row in rows] == [{"what", "against", "ratio"}] * 3
    assert all(row["ratio"] > 0 for row in rows)
