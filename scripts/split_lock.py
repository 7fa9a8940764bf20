"""Splits what uv compiled into the locks that scripts/setup installs one after the other: all but torch, torch, and
the CUDA libraries that only some builds of torch need. `split_lock.py COMPILED FOLDER WHEEL ...`; the wheels are
builds of torch that the package index may not list."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

HEADER = "# Written by scripts/lock; do not edit.\n"
CUDA = ("cuda-", "nvidia-", "triton")  # how the names of the libraries begin that a CUDA build of torch requires
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


def requirements(text: str) -> dict[str, list[str]]:
    """Requirement, with its marker, -> hashes, of a compiled file."""
    entries: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip()):
        if entry:
            entries[entry.split("\\")[0].strip()] = _HASH.findall(entry)
    return entries


def lock_text(entries: dict[str, list[str]]) -> str:
    """A lock: requirements by name, each with all its hashes."""
    lines = [
        " \\\n    ".join([name, *(f"--hash={value}" for value in sorted(hashes))])
        for name, hashes in sorted(entries.items())
    ]
    return HEADER + "\n".join(lines) + "\n"


def split(entries: dict[str, list[str]]) -> dict[str, dict[str, list[str]]]:
    """The requirements of every lock of developers."""
    locks: dict[str, dict[str, list[str]]] = {"dev": {}, "torch": {}, "cuda": {}}
    for name, hashes in entries.items():
        kind = "torch" if name.startswith("torch==") else "cuda" if name.startswith(CUDA) else "dev"
        locks[kind][name] = hashes
    return locks


def main() -> None:
    compiled, folder, *wheels = map(Path, sys.argv[1:])
    more = [f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in wheels]
    locks = split(requirements(compiled.read_text(encoding="utf-8")))
    (torch,) = locks["torch"]
    earlier = folder / "torch.lock"
    if earlier.exists():  # hashes of other builds of the same version, made on other machines, stay
        more += requirements(earlier.read_text(encoding="utf-8")).get(torch, [])
    locks["torch"][torch] = sorted({*locks["torch"][torch], *more})
    for kind, entries in locks.items():
        (folder / f"{kind}.lock").write_text(lock_text(entries), encoding="utf-8")


if __name__ == "__main__":
    main()
