"""The gate: baselines, limits, explanations; and as people run it: GitHub Action, pre-commit hook, pytest plug-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import traincast
from traincast.app.checking import parse_gate
from traincast.app.cli.main import main
from traincast.utils.errors import TraincastError

ROOT = Path(__file__).resolve().parents[2]


def write_scenario(folder, batch_size):
    path = folder / "resnet.yaml"
    path.write_text(f"workload: resnet50\non: v100\nbatch_size: {batch_size}\n")
    return path


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A scratch repository with a scenario and its baseline."""
    monkeypatch.chdir(tmp_path)
    traincast.check([write_scenario(tmp_path, 16)], baseline="perf.json", update="the first one")
    return tmp_path


def test_the_same_step_passes(repository, capsys):
    assert main(["check", "--baseline", "perf.json"]) == 0
    assert capsys.readouterr().out.startswith("passed: 1 scenario within step +3%, memory +2%, kernels +5%\n")


def test_a_slower_step_fails_and_is_explained_by_op_and_module(repository, capsys):
    write_scenario(repository, 18)

    assert main(["check", "--baseline", "perf.json", "resnet.yaml", "--junit", "j.xml", "--markdown", "m.md"]) == 1

    shown = capsys.readouterr().out
    assert "FAIL resnet" in shown
    assert "by op: aten::convolution_backward +" in shown
    assert "by module: ResNet50." in shown
    suite = ElementTree.parse(repository / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert "| resnet | " in (repository / "m.md").read_text()


def test_a_wider_gate_lets_it_through_and_an_update_keeps_its_reason(repository, capsys):
    write_scenario(repository, 18)

    assert main(["check", "--baseline", "perf.json", "resnet.yaml", "--gate", "step:+50%"]) == 0
    assert main(["check", "--baseline", "perf.json", "resnet.yaml", "--update", "--reason", "larger batch"]) == 0
    stored = json.loads((repository / "perf.json").read_text())["scenarios"]["resnet"]
    assert stored["reason"] == "larger batch"
    assert stored["scenario"]["batch_size"] == 18
    assert main(["check", "--baseline", "perf.json"]) == 0


@pytest.mark.parametrize("words", [
    ["--baseline", "none.json"], ["--baseline", "resnet.yaml"], ["--baseline", "perf.json", "none.yaml"],
    ["--baseline", "perf.json", "--update"], ["--baseline", "perf.json", "--reason", "why"],
    ["--baseline", "perf.json", "--gate", "speed:+3%"], ["--baseline", "perf.json", "--gate", "step:3"],
])  # fmt: skip
def test_bad_input_is_one_line(repository, capsys, words):
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_scenario_without_a_baseline_fails(repository):
    other = repository / "other.yaml"
    other.write_text("workload: resnet50\non: v100\nbatch_size: 8\n")

    result = traincast.check([other], baseline="perf.json")

    assert not result.passed
    assert result.rows[0].broken == ("not in the baseline; write it with `update` and a `reason`",)


def test_another_version_of_the_baseline_is_told(repository):
    text = (
        (repository / "perf.json")
        .read_text()
        .replace(f'"traincast": "{traincast.__version__}"', '"traincast": "0.0.9"')
    )
    (repository / "perf.json").write_text(text)

    (note,) = traincast.check(baseline="perf.json").notes
    assert note.startswith("the baseline was written by traincast 0.0.9, this is ")


@pytest.mark.parametrize("text", ["", "step", "step:", "step:+x%", "step:-3%", "memory:+1e9%"])
def test_what_is_no_gate_is_refused(text):
    with pytest.raises(TraincastError, match="gate"):
        parse_gate(text)


def tool_environment(folder):
    bin = folder / "bin"
    bin.mkdir(exist_ok=True)
    (bin / "traincast").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m traincast "$@"\n')
    (bin / "traincast").chmod(0o755)
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT / "src"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }


def run_action(folder, step, **inputs):
    """Runs a step of the composite action as a runner does: inputs become its environment."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (found,) = [one for one in action["runs"]["steps"] if one["name"] == step]
    values = {name: declared.get("default", "") for name, declared in action["inputs"].items()} | inputs
    named = {key: value.replace("${{ inputs.", "").replace(" }}", "") for key, value in found["env"].items()}
    environment = tool_environment(folder) | {key: str(values[name]) for key, name in named.items()}
    return subprocess.run(
        ["bash", "-e", "-c", found["run"]], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_github_action_writes_its_summary_and_fails_when_a_step_got_slower(repository):
    passed = run_action(repository, "Check", baseline="perf.json")
    assert passed.returncode == 0, passed.stderr
    write_scenario(repository, 18)
    failed = run_action(repository, "Check", baseline="perf.json", scenarios="resnet.yaml")

    assert failed.returncode == 1
    summary = (repository / "summary.md").read_text()
    assert "### Traincast: passed" in summary and "### Traincast: failed" in summary
    assert ElementTree.parse(repository / "traincast-junit.xml").getroot().get("failures") == "1"


def test_the_github_action_installs_a_wheel_that_then_checks(repository, monkeypatch):
    wheels, venv = repository / "dist", repository / "venv"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*build, str(ROOT)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    # what the wheel needs is here already: the index is not asked
    needed = [str(Path(found.origin).parents[1]) for name in ("numpy", "msgspec", "yaml") if (found := find_spec(name))]
    monkeypatch.setenv("PATH", f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys.modules[__name__], "tool_environment", lambda folder: {
        **os.environ, "PYTHONPATH": os.pathsep.join(needed), "PIP_NO_INDEX": "1",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    })  # fmt: skip

    (wheel,) = wheels.glob("*.whl")
    installed = run_action(repository, "Install", install=wheel)
    checked = run_action(repository, "Check", baseline="perf.json")

    assert installed.returncode == 0, installed.stderr
    assert (venv / "bin" / "traincast").exists()
    assert checked.returncode == 0, checked.stderr
    assert "### Traincast: passed" in (repository / "summary.md").read_text()


def test_the_pre_commit_hook_checks_the_baseline(repository):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    (repository / "perf.json").rename(hook["args"][0])
    command = [*hook["entry"].split(), *hook["args"]]

    done = subprocess.run(command, cwd=repository, env=tool_environment(repository), capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("passed: 1 scenario")


TESTS = """
import pytest

@pytest.mark.traincast(workload="resnet50", on="v100", batch_size=16, step_ms=500, memory_gb=4, kernels=2000)
def test_small_enough(traincast_prediction):
    assert traincast_prediction.gpus == 1

@pytest.mark.traincast(workload="resnet50", on="v100", batch_size=16, step_ms=1)
def test_too_slow():
    raise AssertionError("the limit is checked first")

@pytest.mark.traincast(workload="no-such-model", on="v100")
def test_unknown():
    pass

def make_step(batch_size):
    import torch
    model = torch.nn.Linear(256, 256)
    data = torch.randn(batch_size, 256)
    return lambda: model(data).sum().backward()

@pytest.mark.traincast(on="h100", batch_size=64, kernels=50)
def test_step_of_this_module(traincast_prediction):
    assert traincast_prediction.workload.batch_size == 64
"""


def test_the_pytest_plug_in_predicts_and_holds_tests_to_their_limits(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "test_steps.py").write_text(TESTS)
    plugin = ["-p", "no:traincast", "-p", "traincast.app.pytest_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", *plugin, "test_steps.py"]

    done = subprocess.run(command, cwd=tmp_path, env=tool_environment(tmp_path), capture_output=True, text=True)

    assert "1 failed, 2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "step_ms 62." in done.stdout and " is above 1" in done.stdout
    assert "unknown model 'no-such-model'" in done.stdout


@pytest.mark.parametrize(("name", "value"), [("iteration_ms", -(2**63)), ("iteration_ms", 0), ("memory_gb", -1.0)])
def test_a_baseline_of_impossible_figures_is_rejected(repository, capsys, name, value):
    document = json.loads((repository / "perf.json").read_text())
    document["scenarios"]["resnet"][name] = value
    (repository / "perf.json").write_text(json.dumps(document))

    assert main(["check", "--baseline", "perf.json"]) == 2
    assert "is no baseline" in capsys.readouterr().err
