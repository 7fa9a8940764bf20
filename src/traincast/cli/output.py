"""Where results go: one JSON document or text on stdout, files through a temporary name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from traincast.errors import TraincastError


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def print_text(text: str) -> None:
    """Text on stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def write_json_file(path: Path, document: Any) -> None:
    """A JSON file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"), allow_nan=False)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TraincastError(f"cannot write '{path}': {error.strerror}") from None
