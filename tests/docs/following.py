"""Pages that say how to extend the package, carried out on a copy of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import traincast
import traincast_evaluation

SOURCES = {package.__name__: Path(package.__file__).parent.parent for package in (traincast, traincast_evaluation)}
ROOT = Path(__file__).resolve().parent.parent.parent
# <!-- file: src/traincast/package/file.py --> makes a file; ", into NAME" adds to the end of the table NAME (or "at the
# front" of it), ", after the imports" adds an import
_STEP = re.compile(r"<!-- file: (?:evaluation/)?src/(\S+?\.py)(?:, (.*?))? -->\n```python\n(.*?)```\n", re.DOTALL)


def follow(page: str, folder: Path) -> list[str]:
    """Copies both packages into `folder` and carries out the steps of a page; gives the files that they touch."""
    steps = _STEP.findall((ROOT / "docs" / "extend" / page).read_text(encoding="utf-8"))
    for name, source in SOURCES.items():
        _link(source / name, folder / name, {source / path for path, _, _ in steps})
    for path, where, code in steps:
        target = folder / path
        text = (
            (target if target.exists() else SOURCES[path.partition("/")[0]] / path).read_text(encoding="utf-8")
            if where
            else ""
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_added(text, where, code), encoding="utf-8")
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


def _added(text: str, where: str, code: str) -> str:
    """The text with the code where the page says."""
    if not where:
        return code
    if where == "after the imports":
        place = [match.end() + 1 for match in re.finditer(r"^from .* import .*$", text, re.MULTILINE)][-1]
    else:
        table, front = re.fullmatch(r"into (\w+)( at the front)?", where).groups()  # type: ignore[union-attr]
        begin = re.search(rf"^{table}\b.*[({{\[]\n", text, re.MULTILINE)
        assert begin, f"there is no table {table}"
        end = re.compile(r"^[)}\]]", re.MULTILINE).search(text, begin.end())
        assert end
        place = begin.end() if front else end.start()
    return text[:place] + code + text[place:]


def run_in(folder: Path, code: str) -> str:
    """What a Python program prints with the package of that folder."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
