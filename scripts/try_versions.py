#!/usr/bin/env python
"""Tries the wheel with every Python of 3.11 to 3.14 and every PyTorch that captures, as far as this machine has them.

    .venv/bin/python scripts/try_versions.py [WHEEL] [--torch 2.12.1,2.13.0,2.14.1]

Each gets an empty virtual environment, from wherever pip is set up to look. A prediction has to come out, and with
PyTorch a capture. What the machine cannot try is said; 1 where something that was tried failed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
STEP = (
    "import torch\n\ndef make_step(batch_size):\n    model = torch.nn.Linear(64, 64)\n"
    "    data = torch.randn(batch_size, 64)\n    return lambda: model(data).sum().backward()\n"
)


def run(*words: str | Path, folder: Path) -> str:
    """Runs a command; gives the last line of what went wrong, or nothing."""
    done = subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]


def try_python(version: str, wheel: Path, torch: str) -> str:
    """One Python, with a PyTorch or without ("")."""
    program = shutil.which(f"python{version}")
    if program is None:
        return "not tried: this machine has no such Python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.py").write_text(STEP, encoding="utf-8")
        if wrong := run(program, "-m", "venv", "v", folder=folder):
            return f"not tried: {wrong}"
        wanted = [str(wheel), *([f"torch=={torch}"] if torch else [])]
        if wrong := run("v/bin/python", "-m", "pip", "install", "-q", *wanted, folder=folder):
            return f"not tried: {wrong}"
        source = "step.py:make_step" if torch else "resnet50"
        wrong = run("v/bin/traincast", "predict", source, "--on", "v100", "--batch-size", "32", folder=folder)
        return f"FAILED: {wrong}" if wrong else "ok"


def main() -> int:
    """Tries all of them, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--torch", default="2.12.1,2.13.0,2.14.1")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if args.wheel is None:
            run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", name, ROOT, folder=ROOT)
        wheel = args.wheel or next(Path(name).glob("*.whl"))
        failed = 0
        for version in PYTHONS:
            for torch in ("", *filter(None, args.torch.split(","))):
                said = try_python(version, wheel.resolve(), torch)
                failed += said.startswith("FAILED")
                print(f"Python {version}, {f'torch {torch}' if torch else 'no torch'}: {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
