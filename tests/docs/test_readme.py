"""README keeps its promises: its commands run, its picture is real output, its figures are the evidence's."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.docs.pages import DOCS, ROOT, blocks_of, shell_environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
_LONGEST = 65
"""Lines: README fits on one screen."""


def shown_commands():
    """The command lines of README without their comments."""
    lines = [line for block in blocks_of(README) if block.language == "sh" for line in block.body.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


RUNNABLE = [line for line in shown_commands() if line.startswith(("traincast ", "scripts/run "))]


def test_readme_shows_six_jobs_and_both_of_the_house():
    shown = [line.split()[1] for line in RUNNABLE if line.startswith("traincast")]
    assert shown == ["predict", "compare", "whatif", "shard", "plan", "models"]
    assert sum(line.startswith("scripts/run ") for line in RUNNABLE) == 1
    assert "`scripts/test`" in README
    assert all(os.access(ROOT / "scripts" / name, os.X_OK) for name in ("run", "test"))


def test_the_first_answer_is_what_is_printed_and_fits(tmp_path):
    (block,) = [block.body for block in blocks_of(README) if block.language == "console"]
    command, *printed = block.strip().splitlines()

    done = subprocess.run(
        command.removeprefix("$ "),
        shell=True,
        env=shell_environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines()[: len(printed)] == printed
    assert "; fits, " in printed[1]


def test_the_chart_is_what_its_script_draws_from_the_table():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_rivals.py"))

    assert (DOCS / "images" / "rivals.svg").read_text(encoding="utf-8") == script["draw_chart"]()


@pytest.mark.parametrize("line", RUNNABLE)
def test_command_of_readme_runs(line, tmp_path):
    # scripts/run only sets up an environment before it hands its arguments on; the environment is that of this test
    command = re.sub(r"^scripts/run ", "traincast ", line)
    if command.startswith("traincast shard"):
        command += " --no-torchrec --time-limit 2"

    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=shell_environment(tmp_path), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "ms" in done.stdout or "llama3-8b" in done.stdout


def test_python_of_readme_runs(tmp_path):
    (code,) = [block.body for block in blocks_of(README) if block.language == "python"]

    environment = shell_environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) == pytest.approx(7.81e-3, abs=5e-6)


def test_picture_is_what_its_script_draws(monkeypatch, tmp_path):
    environment = shell_environment(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    script = runpy.run_path(str(ROOT / "scripts" / "draw_readme.py"))

    assert (DOCS / "images" / "step.svg").read_text(encoding="utf-8") == script["picture"](script["predicted_events"]())


def figures():
    """What, n, GMAE and MAPE of the rows of README's table."""
    rows = [row.split("|")[1:5] for row in README.splitlines() if re.match(r"\|.*\| \d+ \|", row)]
    return [[cell.strip() for cell in row] for row in rows]


def test_figures_are_those_of_the_evidence():
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "evidence").glob("*.md")]

    assert len(figures()) == 7
    for what, n, gmae, mape in figures():
        assert any(all(re.search(rf"\b{re.escape(x)}\b", text) for x in (n, gmae, mape)) for text in pages), what


def test_readme_is_short_and_names_no_machine():
    assert len(README.splitlines()) <= _LONGEST
    assert not re.search(r"/(home|work|tmp|root)/", README)
