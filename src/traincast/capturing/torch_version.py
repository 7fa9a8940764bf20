"""Which versions of PyTorch a capture can trust: it watches the dispatcher from inside, and that changes."""

from __future__ import annotations

import warnings

import torch

from traincast.errors import TraincastError

OLDEST, NEWEST = "2.13", "2.14"
"""Captures are developed and tested with 2.13.0. With 2.14.1, 319 of their 327 tests pass (pipelines must be told their
shapes); with 2.10.0 most captures of several ranks fail."""


def check_torch() -> None:
    """Refuses a PyTorch that is too old, and warns of one that is newer than any that was tried."""
    version = torch.__version__
    minor = _minor(version)
    remedy = f"pip install 'torch=={OLDEST}.*'"
    if minor < _minor(OLDEST):
        raise TraincastError(f"torch {version} is installed, and captures are tested with {OLDEST}: {remedy}")
    if minor > _minor(NEWEST):
        warnings.warn(
            f"torch {version} is installed, and captures are tested with {OLDEST}: ops may be recorded otherwise than "
            f"a GPU runs them; for the tested version: {remedy}",
            stacklevel=2,
        )


def _minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
