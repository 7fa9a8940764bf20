"""Where the measurements are: they are not part of the package."""

from __future__ import annotations

import os
from pathlib import Path

from traincast.utils.errors import TraincastError


def find_measurements_folder(data: str | Path | None) -> Path:
    """The folder named, or $TRAINCAST_DATA."""
    named = data or os.environ.get("TRAINCAST_DATA")
    if named is None:
        raise TraincastError("no folder of measurements: give `data` or set TRAINCAST_DATA")
    folder = Path(named)
    if not folder.is_dir():
        raise TraincastError(f"'{folder}' is no folder of measurements; give another `data`")
    return folder
