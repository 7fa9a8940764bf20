"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public measurements: $TRAINCAST_DATA, or `shared/data` beside the checkout."""
    folder = Path(os.environ.get("TRAINCAST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "devices.csv").is_file():
        pytest.skip(f"no measurements at {folder}; set TRAINCAST_DATA to their folder to run this test")
    return folder
