"""Which versions of PyTorch a capture can trust: it watches the dispatcher from inside, and that changes."""

from __future__ import annotations

import warnings

import torch

from traincast.utils.errors import TraincastError

OLDEST, NEWEST, LOCKED = "2.12", "2.14", "2.13"
"""Captures are developed with 2.13.0 (`LOCKED`: all tests of Traincast run with it), and all their own tests pass with
2.12.1 and 2.14.1 too; with 2.10.0 most captures of several ranks fail."""


def check_torch() -> None:
    """Rejects a PyTorch that is too old, and warns of one that is newer than any that was tried."""
    version = torch.__version__
    minor = _parse_minor_version(version)
    tested, remedy = f"{OLDEST} to {NEWEST}", f"pip install 'torch=={LOCKED}.*'"
    if minor < _parse_minor_version(OLDEST):
        raise TraincastError(f"torch {version} is installed, and captures are tested with {tested}: {remedy}")
    if minor > _parse_minor_version(NEWEST):
        warnings.warn(
            f"torch {version} is installed, and captures are tested with {tested}: ops may be recorded otherwise than "
            f"a GPU runs them; for a tested version: {remedy}",
            stacklevel=2,
        )


def _parse_minor_version(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
