"""Captures that take long, kept in the user's data folder until what made them changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from traincast.costs.cpu.profile import get_profile_home
from traincast.ir.file import load_workload, save_workload
from traincast.ir.workload import Workload


def load_kept_capture(suite: str, name: str, capture: Callable[[], Workload]) -> Workload:
    """The capture of this name, from the suite's folder or made now."""
    path = get_profile_home() / suite / _hash_sources() / f"{name}.tc"
    if path.is_file():
        return load_workload(path)
    workload = capture()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_workload(workload, path)
    return workload


@cache
def _hash_sources() -> str:
    """Changes with the code that captures and with the programs that are captured."""
    digest = hashlib.sha256()
    for package in ("traincast.capturing", "traincast_evaluation.zoo"):
        found = find_spec(package)  # importing it may need torch
        assert found is not None and found.origin is not None
        for file in sorted(Path(found.origin).parent.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
