"""What a recording needs of Python and PyTorch: no garbage collection, and the profiler of host events."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

_Profiler = torch.autograd.profiler.profile
_real = SimpleNamespace(profile=_Profiler)  # scripts get another under every name that modules have for it


@contextmanager
def disable_collection() -> Iterator[None]:
    """Lifetimes must not depend on when Python happens to collect garbage."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def profile_host() -> Iterator[_Profiler]:
    """PyTorch's profiler of host events, without Kineto's start and stop lines on the terminal."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        with _real.profile() as profiler:
            yield profiler
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
