"""A scripted `torch.cuda`: every call is written down, time passes as the script says, no GPU is there.

Where the real one would reject or are, so does this one: an event is read only once the device was waited for, a kernel
that failed makes every later call fail, memory runs out.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch

NAMES = (
    "is_available", "device_count", "set_device", "get_device_properties", "synchronize", "clock_rate", "_sleep",
    "mem_get_info", "memory_reserved", "memory_allocated", "memory_stats", "is_initialized",
)  # fmt: skip
STICKY = "CUDA error: an illegal memory access was encountered"


class FakeCuda:
    """Answers what `CudaDevice` asks. `milliseconds` are what successive events are apart; 1 once they are used up.
    `clock` may be an error, which is raised."""

    def __init__(self, milliseconds=(), devices=1, clock=1410, available=True, name="NVIDIA Fake 9000", hip=None):
        self.calls: list[str] = []
        self.milliseconds = list(milliseconds)
        self.devices, self.clock, self.available, self.name, self.hip = devices, clock, available, name, hip
        self.memory, self.free, self.cache = 80 << 30, 79 << 30, 40 << 20
        self.out_of_memory = self.sticky = False
        self.sleeps = True
        self.now, self.waits, self.used = 0.0, 0, 0

    def install(self, monkeypatch):
        for name in NAMES:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.Tensor, "to", self._moved(torch.Tensor.to))
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pinned(tensor))
        monkeypatch.setattr(torch.profiler, "profile", FakeProfile)
        monkeypatch.setattr(torch.version, "cuda", None if self.hip else "12.8")
        monkeypatch.setattr(torch.version, "hip", self.hip, raising=False)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90100)
        real = {name: getattr(torch, name) for name in ("randn", "randint", "zeros")}
        for name, make in real.items():
            monkeypatch.setattr(torch, name, self._elsewhere(name, make))
        return self

    def _moved(self, real):
        def to(tensor, place, *args, **kwargs):
            if isinstance(place, str) and place.startswith("cuda"):
                self._may_fail(f"to {place}")
                self.used += 1
                return tensor
            return real(tensor, place, *args, **kwargs)

        return to

    def _pinned(self, tensor):
        self._may_fail("pin_memory")
        return tensor

    def _elsewhere(self, name, make):
        def made(*args, device=None, **kwargs):
            if device is not None:
                self._may_fail(f"{name} on {device}")
                self.used += 1
            return make(*args, **kwargs)

        return made

    def _may_fail(self, call):
        self.calls.append(call)
        if self.sticky:
            raise RuntimeError(STICKY)
        if self.out_of_memory:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def is_available(self):
        return self.available

    def is_initialized(self):
        return any(call.startswith("set_device") for call in self.calls)

    def device_count(self):
        return self.devices

    def set_device(self, index):
        self.calls.append(f"set_device {index}")

    def get_device_properties(self, index):
        return SimpleNamespace(name=self.name, total_memory=self.memory, L2_cache_size=self.cache)

    def synchronize(self, index):
        self.calls.append("synchronize")
        if self.sticky:
            raise RuntimeError(STICKY)
        self.waits += 1

    def clock_rate(self, index):
        if isinstance(self.clock, Exception):
            raise self.clock
        return self.clock

    def _sleep(self, cycles):
        if not self.sleeps:
            raise AttributeError("module 'torch._C' has no attribute '_cuda_sleep'")
        self.calls.append(f"sleep {cycles}")

    def mem_get_info(self, index):
        return self.free, self.memory

    def memory_reserved(self, index):
        return 1 << 20

    def memory_allocated(self, index):
        return 1 << 20

    def memory_stats(self):
        return {"allocation.all.allocated": self.used}

    def event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda, self.at, self.recorded = cuda, None, None

    def record(self):
        self.cuda.calls.append("record")
        self.at, self.recorded = self.cuda.now, self.cuda.waits
        self.cuda.now += self.cuda.milliseconds.pop(0) if self.cuda.milliseconds else 1.0

    def elapsed_time(self, other):
        if max(self.recorded, other.recorded) >= self.cuda.waits:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return other.at - self.at


class FakeProfile:
    """A profiler that saw the kernels of `trace`; it must have been asked for those of the GPU, and not in its first
    moments."""

    trace: ClassVar = {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm"}]}

    def __init__(self, activities, record_shapes, schedule, on_trace_ready):
        assert torch.profiler.ProfilerActivity.CUDA in activities
        actions = [schedule(step).name for step in range(3)]
        assert actions == ["WARMUP", "RECORD_AND_SAVE", "NONE"]
        self.ready, self.steps = on_trace_ready, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def step(self):
        self.steps += 1
        if self.steps == 2:
            self.ready(self)

    def export_chrome_trace(self, path):
        Path(path).write_text(json.dumps(self.trace))
