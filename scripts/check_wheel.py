#!/usr/bin/env python
"""Builds the wheel, installs it into an empty virtual environment, and tries what a stranger would try first; then adds
the wheel of traincast-evaluation.

Dependencies are installed in the versions of requirements/run.lock, from wherever pip is set up to look.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPOCH = "1577836800"  # 2020-01-01: the time of every file in the wheel, so that the same commit gives the same bytes
MOST_BYTES = 12_000_000
"""What the wheel may weigh."""
EXPECTED = (
    "traincast/py.typed",
    "traincast/hardware/data/devices/v100.toml",
    "traincast/hardware/data/nodes/dgx-a100.toml",
    "traincast/costs/collectives/profiles/collectives.json",
)
"""Files of every kind that must be in it, besides the licence and the README in its metadata."""
NEEDING = (
    ("evaluate", "dlrm"),
    ("predict", "dlrm-mlperf", "--on", "dgx-a100", "--gpus", "8", "--program", "hugectr"),
)
"""Commands that need traincast-evaluation, and say so without it."""


def run(*command: str | Path, cwd: Path, expect: int = 0) -> str:
    """What a command prints; it must end with the exit code expected. Nothing of this checkout is on its path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    if done.returncode != expect:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + (done.stderr if expect else "")


def build(project: Path, folder: Path) -> Path:
    """The wheel of a project of this checkout, in a folder of its own."""
    shutil.rmtree(project / "build", ignore_errors=True)  # setuptools would add modules that are gone
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, project, cwd=project)
    shutil.rmtree(project / "build", ignore_errors=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_reproducible(folder: Path) -> str:
    """The SHA-256 of the wheel, which two builds from copies of the last commit in different folders both have."""
    digests = []
    for name in ("one", "another"):
        copy = folder / name
        copy.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--extract", "--directory", copy], input=archive, check=True)
        digests.append(hashlib.sha256(build(copy, folder / f"{name}-wheel").read_bytes()).hexdigest())
    assert len(set(digests)) == 1, f"two builds of one commit differ: {', '.join(digests)}"
    return digests[0]


def check_content(wheel: Path) -> None:
    """Size, licence, README and data."""
    size = wheel.stat().st_size
    assert size < MOST_BYTES, f"{wheel.name} has {size / 1e6:.1f} MB; the most is {MOST_BYTES / 1e6:.0f}"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        described = archive.read(metadata).decode("utf-8")
    others = {name.split("/")[0] for name in names} - {"traincast", metadata.split("/")[0]}
    assert not others, f"the wheel has what is not of its package: {', '.join(sorted(others))}"
    missing = [name for name in EXPECTED if name not in names]
    assert not missing, f"not in the wheel: {', '.join(missing)}"
    assert any(name.endswith("licenses/LICENSE") for name in names), "the licence is not in the wheel"
    assert (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[0] in described, "the README is not in it"
    source = ROOT / "src"
    shipped = [path for path in source.rglob("*") if path.suffix in (".toml", ".json", ".npz", ".tc")]
    data = {path.relative_to(source).as_posix() for path in shipped}
    assert data <= names, f"data not in the wheel: {', '.join(sorted(data - names)[:5])}"


def try_commands(traincast: Path, python: Path, folder: Path) -> None:
    """The commands that need nothing but the package, as a program, as a module and from Python."""
    answer = json.loads(run(traincast, "predict", "dlrm-default", "--on", "v100", "--json", cwd=folder))
    assert answer["iteration_ms"] > 0
    assert "bert-large" in run(traincast, "models", cwd=folder)
    assert "dgx-a100" in run(traincast, "platforms", cwd=folder)
    many = run(traincast, "predict", "resnet50", "--on", "dgx-a100", "--gpus", "16", "--json", cwd=folder)
    assert json.loads(many)["gpus"] == 16
    run(traincast, "export", "dlrm-default", "-o", "step.json", cwd=folder)
    assert json.loads((folder / "step.json").read_text(encoding="utf-8"))["nodes"]
    again = run(python, "-m", "traincast", "predict", "dlrm-default", "--on", "v100", "--json", cwd=folder)
    assert json.loads(again) == answer
    assert "traincast" in run(traincast, "completion", "bash", cwd=folder)
    code = "import traincast; print(1e3 * traincast.predict('dlrm-default', on='v100').iteration)"
    assert float(run(python, "-c", code, cwd=folder)) == answer["iteration_ms"]
    said = run(traincast, "capture", "step.py:make_step", "-o", "step.tc", "--batch-size", "8", cwd=folder, expect=2)
    assert "pip install 'traincast[capture]'" in said, said


def try_without_evaluation(traincast: Path, folder: Path) -> None:
    """What needs the second distribution says so in one line, and help does not offer it."""
    assert "evaluate" not in run(traincast, "--help", cwd=folder)
    for command in NEEDING:
        said = run(traincast, *command, cwd=folder, expect=2)
        assert "needs the distribution traincast-evaluation" in said and said.count("\n") == 1, said


def try_evaluation(traincast: Path, folder: Path) -> None:
    """With the second distribution the command is there, and published programs are predicted by name."""
    assert "predicted against measured" in run(traincast, "--help", cwd=folder)
    answer = run(traincast, "predict", "hugectr-dlrm", "--on", "dgx-a100", "--gpus", "8", "--json", cwd=folder)
    assert json.loads(answer)["iteration_ms"] > 0
    said = run(traincast, "evaluate", "dlrm", "--data", folder, cwd=folder, expect=2)
    assert "traincast-evaluation" not in said and said.count("\n") == 1, said


def versions(folder: Path) -> Path:
    """The versions of requirements/run.lock without its hashes, which pip would then ask of the new wheel as well."""
    lines = (ROOT / "requirements" / "run.lock").read_text(encoding="utf-8").splitlines()
    constraints = folder / "versions.txt"
    constraints.write_text("".join(line.split()[0] + "\n" for line in lines if "==" in line), encoding="utf-8")
    return constraints


def main() -> None:
    """Builds, checks and tries."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = build(ROOT, folder / "wheel")
        check_content(wheel)
        digest = check_reproducible(folder / "again")
        run(sys.executable, "-m", "venv", folder / "empty", cwd=folder)
        programs = folder / "empty" / "bin"
        pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "--constraint", versions(folder), wheel, cwd=folder)
        try_commands(programs / "traincast", programs / "python", folder)
        try_without_evaluation(programs / "traincast", folder)
        run(*pip, "--no-deps", build(ROOT / "evaluation", folder / "evaluation"), cwd=folder)
        try_evaluation(programs / "traincast", folder)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, sha256 {digest}, installs and answers")


if __name__ == "__main__":
    main()
