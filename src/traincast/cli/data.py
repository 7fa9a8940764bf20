"""Where the measurements are: they are not part of the package."""

from __future__ import annotations

import os
from pathlib import Path

from traincast.errors import TraincastError


def measurements_folder(given: Path | None) -> Path:
    """The folder named on the command line, or $TRAINCAST_DATA."""
    folder = given or (Path(os.environ["TRAINCAST_DATA"]) if "TRAINCAST_DATA" in os.environ else None)
    if folder is None:
        raise TraincastError("no folder of measurements: give --data DIR or set TRAINCAST_DATA")
    if not folder.is_dir():
        raise TraincastError(f"'{folder}' is no folder of measurements; give another --data DIR")
    return folder
