"""Reading the files of published measurements."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from traincast.errors import TraincastError


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV table of measurements."""
    with _existing(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def settings_of(path: Path) -> dict[str, Any]:
    """The YAML document that describes measured configurations."""
    import yaml

    document: dict[str, Any] = yaml.safe_load(_existing(path).read_text(encoding="utf-8"))
    return document


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise TraincastError(f"'{path}' is missing; point `data` at the folder of measurements")
    return path
