"""Which versions of PyTorch a capture can trust: it watches the dispatcher from inside, and that changes."""

from __future__ import annotations

import warnings

import torch

from traincast.errors import TraincastError

TESTED = "2.13"
"""The version that captures are developed and tested with; its patch releases count as tested."""

OLDEST = "2.9"
"""Versions before this one lack what the recorder stands on, or were released too long ago to be looked at."""


def check_torch(version: str | None = None) -> None:
    """Refuses a PyTorch that is too old, and warns of one that captures were not tested with."""
    version = version or torch.__version__
    minor = _minor(version)
    if minor == _minor(TESTED):
        return
    if minor < _minor(OLDEST):
        raise TraincastError(
            f"captures need torch {OLDEST} or newer, and torch {version} is installed; they are tested with {TESTED}: "
            f"pip install 'torch=={TESTED}.*'"
        )
    warnings.warn(
        f"captures are tested with torch {TESTED}, and torch {version} is installed: ops may be recorded otherwise "
        f"than a GPU runs them; for a tested version: pip install 'torch=={TESTED}.*'",
        stacklevel=2,
    )


def _minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
