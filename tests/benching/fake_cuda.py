"""A scripted `torch.cuda`: every call is written down, time passes as the script says, no GPU is there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch


class FakeCuda:
    """Answers what `CudaDevice` asks. `milliseconds` are what successive pairs of events are apart."""

    def __init__(self, milliseconds=(1.0,), devices=1, clock=1410, available=True):
        self.calls: list[str] = []
        self.milliseconds = list(milliseconds)
        self.devices, self.clock, self.available = devices, clock, available
        self.out_of_memory = False
        self.now = 0.0

    def install(self, monkeypatch):
        for name in ("is_available", "device_count", "set_device", "get_device_properties", "synchronize",
                     "clock_rate"):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.Tensor, "to", self._moved(torch.Tensor.to))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pinned(tensor))
        monkeypatch.setattr(torch.profiler, "profile", FakeProfile)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90100)
        real = {name: getattr(torch, name) for name in ("randn", "randint", "zeros")}
        for name, make in real.items():
            monkeypatch.setattr(torch, name, self._elsewhere(name, make))
        return self

    def _moved(self, real):
        def to(tensor, place, *args, **kwargs):
            if isinstance(place, str) and place.startswith("cuda"):
                self.calls.append(f"to {place}")
                return tensor
            return real(tensor, place, *args, **kwargs)

        return to

    def _pinned(self, tensor):
        self.calls.append("pin_memory")
        return tensor

    def _elsewhere(self, name, make):
        def made(*args, device=None, **kwargs):
            if device is not None:
                self.calls.append(f"{name} on {device}")
            if self.out_of_memory and device is not None:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return make(*args, **kwargs)

        return made

    def is_available(self):
        return self.available

    def device_count(self):
        return self.devices

    def set_device(self, index):
        self.calls.append(f"set_device {index}")

    def get_device_properties(self, index):
        return SimpleNamespace(name="NVIDIA Fake 9000", total_memory=80 << 30)

    def synchronize(self, index):
        self.calls.append("synchronize")

    def clock_rate(self, index):
        if self.clock is None:
            raise ModuleNotFoundError("pynvml")
        return self.clock

    def event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda, self.at = cuda, None

    def record(self):
        self.cuda.calls.append("record")
        self.at = self.cuda.now
        self.cuda.now += self.cuda.milliseconds.pop(0) if self.cuda.milliseconds else 1.0

    def elapsed_time(self, other):
        assert "synchronize" in self.cuda.calls[-1], "an event is read only after the device was waited for"
        return other.at - self.at


class FakeProfile:
    """A profiler that saw one kernel; it must have been asked for those of the GPU."""

    def __init__(self, activities, record_shapes):
        assert torch.profiler.ProfilerActivity.CUDA in activities

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def step(self):
        pass

    def export_chrome_trace(self, path):
        Path(path).write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm"}]}))
