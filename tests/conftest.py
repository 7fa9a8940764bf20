"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches tests and the processes they start: a shell starts background jobs with it ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
