#!/usr/bin/env python
"""Tries the wheel with every Python of 3.11 to 3.14 and every PyTorch since 2.12, as far as this machine has them.

    .venv/bin/python scripts/try_versions.py [WHEEL] [--python 3.14] [--torch 2.12.1,2.15.0]

Each pair gets an empty virtual environment, made by uv where it is on the PATH (it links what it has unpacked before;
PyTorch with CUDA takes 6 GB), else by pip. A prediction has to come out, and with PyTorch a capture of two ranks too.
What the machine cannot try is said; 1 where something that was tried failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
FIRST_TORCH = (2, 12)
STEP = (
    "import torch\n\ndef make_step(batch_size):\n    model = torch.nn.Sequential(torch.nn.Linear(64, 64),\n"
    "        torch.nn.ReLU(), torch.nn.Linear(64, 8))\n    best = torch.optim.Adam(model.parameters())\n"
    "    data = torch.randn(batch_size, 64)\n\n    def step():\n        best.zero_grad()\n"
    "        model(data).sum().backward()\n        best.step()\n\n    return step\n"
)
SCRIPT = (
    "import os\nimport torch\nimport torch.distributed as dist\n"
    "from torch.nn.parallel import DistributedDataParallel\n\n"
    "dist.init_process_group('nccl')\ndevice = torch.device('cuda', int(os.environ['LOCAL_RANK']))\n"
    "model = DistributedDataParallel(torch.nn.Linear(64, 8).to(device))\n"
    "best = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(5):\n    best.zero_grad()\n    model(torch.randn(32, 64, device=device)).sum().backward()\n"
    "    best.step()\n"
)
WITHOUT_TORCH = ("predict resnet50 --on v100 --batch-size 32", "models llama", "compare dlrm-default --on v100,h100")
WITH_TORCH = (
    "predict step.py:make_step --on v100 --batch-size 32",
    "capture train.py --gpus 2 -o train.tc",
    "predict train.tc --on dgx-h100",
)


def run(*words: str | Path, folder: Path) -> str:
    """Runs a command; gives the last line of what went wrong, or nothing."""
    done = subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]


def find_python(version: str) -> str | None:
    """A Python of this version that runs: from the PATH, or one of pyenv's."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *sorted(kept.glob(f"{version}.*/bin/python{version}"))]
    for program in filter(None, found):
        if not run(program, "-c", "import venv", folder=ROOT):
            return str(program)
    return None


def list_torches() -> list[str]:
    """The last release of every PyTorch since 2.12 that pip can find."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    newest: dict[tuple[int, ...], str] = {}
    for text in re.findall(r"\d+\.\d+\.\d+\b(?!\+)", said.partition("Available versions:")[2]):
        minor = tuple(int(part) for part in text.split(".")[:2])
        if minor >= FIRST_TORCH:
            newest.setdefault(minor, text)
    return [newest[minor] for minor in sorted(newest)]


def make_environment(program: str, wanted: list[str], folder: Path) -> str:
    """A virtual environment v with these packages; gives what went wrong, or nothing."""
    if uv := shutil.which("uv"):
        wrong = run(uv, "venv", "-q", "--python", program, "v", folder=folder)
        return wrong or run(uv, "pip", "install", "-q", "--python", "v/bin/python", *wanted, folder=folder)
    wrong = run(program, "-m", "venv", "v", folder=folder)
    return wrong or run("v/bin/python", "-m", "pip", "install", "-q", *wanted, folder=folder)


def try_python(version: str, wheel: Path, torch: str) -> str:
    """One Python, with a PyTorch or without ("")."""
    program = find_python(version)
    if program is None:
        return "not tried: this machine has no such Python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.py").write_text(STEP, encoding="utf-8")
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        if wrong := make_environment(program, [str(wheel), *([f"torch=={torch}"] if torch else [])], folder):
            return f"not tried: {wrong}"
        for command in WITH_TORCH if torch else WITHOUT_TORCH:
            if wrong := run("v/bin/traincast", *command.split(), folder=folder):
                return f"FAILED: {command}: {wrong}"
    return "ok"


def main() -> int:
    """Tries all of them, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--python", default=",".join(PYTHONS))
    parser.add_argument("--torch", help="versions, or nothing for none; else the last of every minor release")
    args = parser.parse_args()
    torches = list_torches() if args.torch is None else [one for one in args.torch.split(",") if one]
    with tempfile.TemporaryDirectory() as name:
        build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", name, ROOT)
        if args.wheel is None and (wrong := run(*build, folder=ROOT)):
            print(f"the wheel does not build: {wrong}")
            return 1
        wheel = args.wheel or next(Path(name).glob("*.whl"))
        failed = 0
        for version in args.python.split(","):
            for torch in ("", *torches):
                began = time.monotonic()
                said = try_python(version, wheel.resolve(), torch)
                failed += said.startswith("FAILED")
                what = f"torch {torch}" if torch else "no torch"
                print(f"Python {version}, {what}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
