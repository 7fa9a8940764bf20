"""What the tests of measuring share: clocks and sizes that are not this machine's."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from traincast.calibration import here as question
from traincast.calibration.bench import bench, device

_LOOK = 0.1  # seconds that pass between two looks at the clock


@pytest.fixture
def small(monkeypatch):
    """Work that is small enough for a CPU to stand in."""
    monkeypatch.setitem(device._REFERENCE_SIDE, "cuda", 4)
    monkeypatch.setattr(device, "_MOST_WARMING", 3)
    monkeypatch.setattr("traincast.calibration.bench.devices._LEAST_FLUSHED", 64)
    monkeypatch.setattr("traincast.calibration.bench.devices._FLUSHED_CACHES", 0)


@pytest.fixture
def counted_budget(monkeypatch):
    """Budgets end after this many looks at the clock: what is measured in them does not depend on how fast that is."""
    looks = count()
    clock = SimpleNamespace(monotonic=lambda: _LOOK * next(looks))
    for module in (bench, question):
        monkeypatch.setattr(module, "time", clock)
