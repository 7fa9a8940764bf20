"""What the tests of a scripted GPU share."""

from __future__ import annotations

import pytest

from traincast.benching import timing


@pytest.fixture
def small(monkeypatch):
    """Work that is small enough for a CPU to stand in."""
    monkeypatch.setitem(timing._REFERENCE_SIDE, "cuda", 4)
    monkeypatch.setattr(timing, "_MOST_WARMING", 3)
    monkeypatch.setattr("traincast.benching.cuda._LEAST_FLUSHED", 64)
    monkeypatch.setattr("traincast.benching.cuda._FLUSHED_CACHES", 0)
