"""The report that a person with a GPU runs first, on a scripted one."""

from __future__ import annotations

import time

import torch

from tests.calibration.bench.fake_cuda import FakeCuda, FakeProfile
from traincast.app.api import self_check
from traincast.calibration.bench.devices import CudaDevice


def checked(monkeypatch, devices=1, **script):
    """The self-check on a scripted GPU whose clock runs with the host's."""
    cuda = FakeCuda(devices=devices, **script).install(monkeypatch)
    monkeypatch.setattr("traincast.calibration.bench.selfcheck._TIMED_SECONDS", 1e-3)
    report = self_check("cuda")
    return cuda, report, {part: (good, said) for part, good, said in report.parts}


def test_the_self_check_runs_on_a_scripted_gpu(monkeypatch, small):
    monkeypatch.setattr(time, "perf_counter", iter(x * 1e-3 for x in range(100000)).__next__)
    _, report, parts = checked(monkeypatch)
    assert [(part, said) for part, good, said in report.parts if not good] == []
    assert "NVIDIA Fake 9000" in report.headline() and report.passed
    assert parts["clock"][1] == "1410 MHz under load"
    assert parts["memory"][1] == "84.8 GB free"
    assert parts["collectives"][1] == "not tried: one core or GPU has nobody to communicate with"


def test_the_self_check_says_what_is_wrong(monkeypatch, small):
    # the host's clock stands still, no clock can be read, the profiler sees no kernel, ranks say nothing
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(FakeProfile, "trace", {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm"}]})
    monkeypatch.setattr("traincast.calibration.bench.ranks.run_ranks", lambda *_, **__: None)
    _, report, parts = checked(monkeypatch, devices=2, clock=RuntimeError())
    assert not report.passed
    assert parts["clock"] == (True, "cannot be read (on NVIDIA: pip install nvidia-ml-py)")
    assert parts["timer"] == (False, "RuntimeError: 1.00 ms by the device's clock, 0.00 by the host's")
    assert parts["profiler"][1].startswith("RuntimeError: 1 events and no kernel among them; CUPTI or roctracer")
    assert parts["collectives"] == (False, "RuntimeError: 2 ranks gave no answer within 60 s")


def test_the_self_check_looks_at_what_it_gets(monkeypatch, small):
    def answer(_, ranks, each, **__):
        each({"step": [2e-3] * ranks})

    monkeypatch.setattr("traincast.calibration.bench.ranks.run_ranks", answer)
    monkeypatch.setattr("traincast.calibration.bench.selfcheck._STEADY", -1.0)
    monkeypatch.setattr(CudaDevice, "allocate", lambda _, shape, dtype="float32": torch.ones(shape) * float("nan"))
    _, _, parts = checked(monkeypatch, devices=2)
    assert parts["memory"] == (False, "RuntimeError: tensors are not what was asked for")
    assert parts["reference"] == (False, "RuntimeError: its time varies by 0%; end other programs")
    assert parts["collectives"] == (True, "all-reduce of 1 MB between 2 ranks in 2.00 ms")
