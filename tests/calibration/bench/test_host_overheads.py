"""What the host of a GPU takes, out of recorded traces."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.calibration.bench.fake_cuda import FakeCuda, FakeProfile
from traincast.calibration.bench import inside
from traincast.calibration.bench.devices import CudaDevice
from traincast.calibration.bench.parts import measure_host, plan_parts
from traincast.calibration.bench.signatures import is_overhead, parse_overhead_signature
from traincast.calibration.bench.store import Store
from traincast.ir.ops import Signature
from traincast.utils.errors import TraincastError

TRACE = json.loads((Path(__file__).parents[3] / "docs" / "tutorial" / "example-trace.json").read_text())


@pytest.fixture
def device(monkeypatch, small):
    """A GPU on which every small step looks like that of a recorded trace."""
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(FakeProfile, "trace", TRACE)
    steps = [
        SimpleNamespace(name=f"step-{number}", batch_size=8, tables=(), make=lambda _: lambda: None)
        for number in range(3)
    ]
    monkeypatch.setattr(inside, "draw_small_steps", lambda _: iter(steps))
    return CudaDevice()


def test_overheads_of_traced_steps_are_samples(device, tmp_path):
    store, said = Store(tmp_path, device.identity()), []
    assert measure_host(device, store, 0, inf, lambda: said.append(1)) == []
    assert len(said) == 3 and len(store) % 3 == 0 and "step-2" in store
    kinds = {parse_overhead_signature(sample.signature) for sample in store.samples()}
    assert ("T4", "launch") in kinds and {kind for kind, _ in kinds} >= {"T1", "T2", "T3", "T4"}
    assert all(is_overhead(sample.signature) and sample.wall < 1e-3 for sample in store.samples())
    before = len(store)
    measure_host(device, store, 0, inf, lambda: None)
    assert len(store) == before, "a step that is there is not traced again"
    assert measure_host(device, Store(tmp_path / "other", device.identity()), 0, -1.0, lambda: None) == []


def test_a_profiler_that_sees_nothing_is_told_of(device, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeProfile, "trace", {"traceEvents": []})
    (said,) = measure_host(device, Store(tmp_path, device.identity()), 0, inf, lambda: None)
    assert said.startswith("the host's overheads could not be measured: ")


def test_a_dry_run_counts_traced_steps():
    assert plan_parts("cuda", 60.0, 0.0, 0.0, 0.0) == {"host steps": 12}


def test_a_damaged_sample_is_refused():
    with pytest.raises(TraincastError, match="overhead in the store is damaged"):
        parse_overhead_signature(Signature("traincast::overhead", (), (), (("overhead", "T9"), ("of", "x"))))
