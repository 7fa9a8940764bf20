"""The host while a step is recorded: PyTorch's profiler, no garbage collection, and work that is not PyTorch's."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from traincast.capturing.errors import find_user_line
from traincast.capturing.recorder import Recorder

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


_GAP = 1e-3  # seconds between two calls of PyTorch from which on they are work of their own
_TOLD = 10e-3  # seconds of a step from which on it is told


class HostClock:
    """Adds up the time between calls of PyTorch while a step is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last = self._total = self._longest = self._loading = 0.0
        self._where = ""
        self._waits, self._used = 0, 0.0

    def start(self) -> None:
        """The step begins."""
        self._total = self._longest = self._loading = 0.0
        self._recorder.clock = self
        self.leave()

    def stop(self) -> None:
        """The step ends."""
        self.enter()
        self._recorder.clock = None

    def enter(self) -> None:
        """A call of PyTorch begins."""
        gap = time.perf_counter() - self._last
        if gap > _GAP:
            waited = _count_own_waits() > self._waits  # else others had the core
            gap = gap if waited else time.thread_time() - self._used
        if gap > _GAP:
            self._total += gap
            if gap > self._longest:
                self._longest, self._where = gap, find_user_line()

    def leave(self) -> None:
        """A call of PyTorch has ended."""
        self._waits, self._used = _count_own_waits(), time.thread_time()
        self._last = time.perf_counter()

    def add_loading(self, seconds: float) -> None:
        """A data loader has made a batch, which it does beside the step in a real run."""
        self._loading += seconds
        self.leave()

    def describe(self, updates: int) -> list[str]:
        """What is to be said of a step of this many updates."""
        notes = []
        if self._total > _TOLD * updates:
            notes.append(
                f"{1e3 * self._total:.3g} ms of the step are work of the host outside PyTorch, as timed on this "
                f"machine (the longest before {self._where.rsplit('/', 1)[-1]}): they are not in its time; "
                f"`loader_ms` {1e3 * self._total:.3g} counts them"
            )
        if self._loading > _TOLD * updates:
            notes.append(
                f"the data loader takes {1e3 * self._loading:.3g} ms a step here in one process, beside the step: "
                f"not in its time; `loader_ms` {1e3 * self._loading:.3g} with `loader_workers` counts them"
            )
        return notes


def _count_own_waits() -> int:
    """How often this thread gave up its core by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
