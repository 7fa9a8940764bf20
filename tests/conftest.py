"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(trylast=True)  # Hypothesis loads its profile in its own
def pytest_configure() -> None:
    """What tests find is the same however they are started, and whichever ran before them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start what runs in the background so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if settings().derandomize:
        # examples are also drawn from constants in the source of all modules that were imported by then
        providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests find nothing that somebody has measured on this machine, and leave nothing there."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_DATA_HOME", "XDG_STATE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public measurements: $TRAINCAST_DATA, or `shared/data` alongside the checkout."""
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
