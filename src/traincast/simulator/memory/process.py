"""Device memory that a training process holds outside of PyTorch's allocator, and what libraries take inside of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traincast.hardware.device import AMPERE, HOPPER, Device
from traincast.ir.memory import MemoryEvents

_MIB = 1 << 20
_CONTEXT_MIB = {"newest": 600, "before": 560, "older": 400, "amd": 900}
"""CUDA context with the modules that a training step loads (PyTorch 2, CUDA 12 with lazy loading); what nvidia-smi
shows of a process that has allocated nothing, with cuBLAS and cuDNN loaded. Set by hand."""
_COMMUNICATOR_MIB = 700
"""Buffers of one NCCL communicator with its channels: TorchRec's benchmark on two ranks uses 500 to 2,000 beyond what
is reserved and the context. Set by hand with its rows in view."""
CONTEXT_SPREAD = 0.5
"""Log-sigma of both: they depend on driver, release and which kernels were loaded."""
_HANDLES = 2  # of cuBLAS: one of the thread that runs forward, one of autograd's
_CUBLAS_BYTES = (2 * 4096 + 8 * 16) * 1024
"""PyTorch's default workspace of a cuBLAS handle (`:4096:2:16:8`)."""
_CUBLAS_HOPPER_BYTES = 32 * _MIB
"""That of Hopper and later."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes outside of the allocator: the context with loaded modules, and buffers of communicators."""

    context: float
    communicators: float

    @property
    def total(self) -> float:
        """Both."""
        return self.context + self.communicators

    def to_dict(self) -> dict[str, Any]:
        """In GB."""
        return {"context_gb": self.context / 1e9, "communicators_gb": self.communicators / 1e9}


def estimate_process_memory(device: Device, communicators: int) -> ProcessMemory:
    """What a process on a device holds that communicates in this many groups of ranks."""
    if device.vendor != "nvidia":
        kind = "amd"
    elif device.is_capability_at_least(HOPPER):
        kind = "newest"
    else:
        kind = "before" if device.is_capability_at_least(AMPERE) else "older"
    return ProcessMemory(_CONTEXT_MIB[kind] * _MIB, communicators * _COMMUNICATOR_MIB * _MIB)


def add_workspaces(events: MemoryEvents, device: Device) -> MemoryEvents:
    """The step with the workspaces of cuBLAS, which PyTorch allocates when a handle is first used."""
    if device.is_cpu or not events.ticks:
        return events
    size = _CUBLAS_HOPPER_BYTES if device.is_capability_at_least(HOPPER) else _CUBLAS_BYTES
    labels = (*events.labels, "cuBLAS")
    return events.add_blocks(
        np.full(_HANDLES, size), born=-1, gone=events.ticks, appears=0, label=len(events.labels), labels=labels
    )
