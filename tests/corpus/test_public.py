"""The list of public scripts is well formed, and the one command that runs it tells what came of each."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.corpus.made_data import _MAKERS, make_file
from tests.corpus.public import LIST, Script, Trial, check_out, list_scripts, read_trial, try_script
from tests.corpus.public_on_cpu import compare_with_cpu

_TRAIN = """
import sys, torch
from torch import nn
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
words = open("input.txt").read()
for i in range(12):
    for _ in range(2):
        model(torch.rand(int(sys.argv[1]), 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_list_has_enough_scripts_at_fixed_commits():
    scripts = list_scripts()
    assert len(scripts) >= 60 and len({script.name for script in scripts}) == len(scripts)
    assert all(re.fullmatch(r"[0-9a-f]{40}", script.commit) for script in scripts)
    assert all(item.split()[0] in _MAKERS for script in scripts for item in script.data)
    assert "{batch_size}" in LIST.read_text()


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    clone = folder / "somebody+scripts"
    clone.mkdir()
    (clone / "train.py").write_text(_TRAIN)
    chosen = 'from torch import nn; place = "cuda" if torch.cuda.is_available() else "cpu"'
    anywhere = _TRAIN.replace(".cuda()", ".to(place)").replace('"cuda"', "place")
    (clone / "anywhere.py").write_text(anywhere.replace("from torch import nn", chosen))
    said = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b"}  # fmt: skip
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "scripts"]):
        subprocess.run(["git", "-C", str(clone), *command], check=True, env=said)
    return folder


def _make_script(sources: Path, **fields) -> Script:
    clone = str(sources / "somebody+scripts")
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return Script("one", "somebody/scripts", commit.stdout.strip(), **{"file": "train.py", **fields})


def test_a_script_is_checked_out_with_its_data_and_captured(sources: Path, tmp_path: Path):
    script = _make_script(sources, arguments="{batch_size}", batch=4, samples=8, data=("text input.txt",))
    folder = check_out(script, sources, tmp_path)
    assert folder is not None and (folder / "input.txt").stat().st_size > 1000
    trial = try_script(script, folder, limit=120.0)
    assert (trial.outcome, trial.why) == ("any size", "") and trial.ops > 20
    assert trial.samples == 8 and trial.samples_agree and trial.milliseconds > 0


def test_the_ops_of_a_script_are_those_of_a_real_run_and_its_trial_is_kept(sources: Path, tmp_path: Path):
    fields = {"file": "anywhere.py", "arguments": "{batch_size}", "batch": 4, "on_cpu": "same"}
    script = _make_script(sources, data=("text input.txt",), **fields)
    folder = check_out(script, sources, tmp_path)
    assert folder is not None and read_trial(script, tmp_path) is None
    trial = try_script(script, folder, limit=120.0)
    assert read_trial(script, tmp_path) == trial and trial.outcome == "any size"
    assert compare_with_cpu(script, folder) == []
    other = _make_script(sources, **{**fields, "on_cpu": "8"})
    assert "captured" in compare_with_cpu(other, folder)[0]


def test_a_script_whose_data_is_not_there_is_told_from_one_that_fails(sources: Path, tmp_path: Path):
    script = _make_script(sources, arguments="4")
    folder = check_out(script, sources, tmp_path)
    assert folder is not None
    assert try_script(script, folder, limit=120.0).outcome == "absent"
    make_file("text", folder / "input.txt")
    assert try_script(_make_script(sources, arguments="four"), folder, limit=120.0).outcome == "raw"


def test_an_error_is_the_scripts_own_only_where_it_fails_so_without_a_capture(sources: Path, tmp_path: Path):
    four = _make_script(sources, file="anywhere.py", arguments="four", data=("text input.txt",))
    folder = check_out(four, sources, tmp_path)
    assert folder is not None
    trial = try_script(four, folder, limit=120.0)
    assert trial.outcome == "own error"
    assert re.match(r"/somebody\+scripts/anywhere.py:9: the run failed before its first update: ValueError", trial.why)
    only = (folder / "anywhere.py").read_text().replace("sys.argv[1]", "sys.argv[1 if 'cuda' in place else 2]")
    (folder / "anywhere.py").write_text(only)  # fails at the same line with another error without a capture
    assert try_script(four, folder, limit=120.0).outcome == "raw"


def test_a_repository_that_is_not_cloned_is_left_out(sources: Path, tmp_path: Path):
    assert check_out(Script("two", "nobody/here", "0" * 40, "train.py"), sources, tmp_path) is None
    assert not Trial("two", "any size", ops=3, samples=1.0, stated=4).samples_agree
