"""Promise: no file that was there is lost, none is written that nobody asked for, and two processes on one file of
results leave it whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.formats import FORMATS, Format
from tests.fuzz.running import _find_touched, run_cases

TOGETHER = 3
TRIES = len(FORMATS) + 2 * TOGETHER
"""A changed file of each format, and pairs of processes; `scripts/interrupt` ends commands that write."""


def test_changed_files_stay_and_nothing_is_written_elsewhere():
    light = [form for form in FORMATS if form.name not in ("machine profile", "dense yaml")]
    assert [str(finding) for form in light for finding in run_cases(form, range(900, 901))] == []


def test_a_file_that_is_lost_or_foreign_is_seen(tmp_path):
    place, elsewhere = tmp_path / "case", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.mkdir()
    (place / "out").touch()
    command = ["export", "x", "-o", str(place / "out")]
    assert _find_touched(command, place, elsewhere, {}) == ""
    assert "files lost: given" in _find_touched(command, place, elsewhere, {"given": b"1"})
    (elsewhere / "cache").touch()
    assert "foreign files: elsewhere/cache" in _find_touched(command, place, elsewhere, {})


def test_a_command_that_writes_beside_its_output_is_seen(tmp_path):
    def make(rng, folder: Path) -> list[str]:
        return ["export", "dlrm-ddp", "--out", "here.json"]  # into the folder where it runs

    (finding,) = run_cases(Format("made up", make), range(1))
    assert "elsewhere/here.json" in finding.problem


@pytest.mark.parametrize("kind", ["baseline", "journal"])
def test_two_processes_on_one_file_leave_it_whole(kind, tmp_path):
    names = [f"step{number}" for number in range(TOGETHER)]
    for name in names:
        (tmp_path / f"{name}.yaml").write_text("{workload: dlrm-ddp, on: v100, batch_size: 64}")
    words = {
        "baseline": "check {}.yaml --baseline perf.json --update --reason both",
        "journal": "sweep dlrm-ddp --on v100 --vary batch-size=8,16 --processes 1 --out out.csv",
    }[kind]
    started = [
        subprocess.Popen([sys.executable, "-m", "traincast", *words.format(name).split()], cwd=tmp_path,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in names
    ]  # fmt: skip
    said = [process.communicate()[1] for process in started]
    codes = [process.returncode for process in started]

    assert set(codes) <= {0, 2} and 0 in codes, said
    assert all("another sweep" in text for code, text in zip(codes, said, strict=True) if code == 2)
    if kind == "baseline":
        assert list(json.loads((tmp_path / "perf.json").read_text())["scenarios"]) == names
    else:
        assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(f"{name}.yaml" for name in names), "perf.json" if kind == "baseline" else "out.csv"]
    )
