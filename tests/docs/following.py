"""Pages that say how to extend the package, carried out on a copy of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import traincast

PACKAGE = Path(traincast.__file__).parent
ROOT = Path(__file__).resolve().parent.parent.parent
# <!-- file: src/traincast/room/file.py --> makes a file, "..., into NAME" adds to the end of the table NAME
_STEP = re.compile(r"<!-- file: src/(\S+?)(?:, into (\w+))? -->\n```python\n(.*?)```\n", re.DOTALL)


def follow(page: str, folder: Path) -> list[str]:
    """Makes a copy of the package in `folder` with the steps of a page carried out; gives the files that they touch."""
    steps = _STEP.findall((ROOT / "docs" / "extend" / page).read_text(encoding="utf-8"))
    _link(PACKAGE, folder / "traincast", {PACKAGE.parent / path for path, _, _ in steps})
    for path, table, code in steps:
        text = _added((PACKAGE.parent / path).read_text(encoding="utf-8"), table, code) if table else code
        (folder / path).write_text(text, encoding="utf-8")
    return sorted({path for path, _, _ in steps})


def _link(source: Path, target: Path, touched: set[Path]) -> None:
    """Links everything but the files that will be written and the folders they are in."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.name == "__pycache__" or entry in touched:
            continue
        if any(entry in path.parents for path in touched):
            _link(entry, target / entry.name, touched)
        else:
            (target / entry.name).symlink_to(entry)


def _added(text: str, table: str, code: str) -> str:
    """The text with the code before the line that closes the table."""
    begin = re.search(rf"^{table}\b.*[({{\[]$", text, re.MULTILINE)
    assert begin, f"there is no table {table}"
    end = re.compile(r"^[)}\]]", re.MULTILINE).search(text, begin.end())
    assert end
    return text[: end.start()] + code + text[end.start() :]


def run_in(folder: Path, code: str) -> str:
    """What a Python program prints with the package of that folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
