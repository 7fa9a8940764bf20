"""Which devices there are, by name."""

from __future__ import annotations

from traincast.benching.device import Device
from traincast.errors import unknown

DEVICES = ("cpu", "cuda")


def open_device(kind: str, index: int = 0) -> Device:
    """The device of this kind on this machine, of several GPUs number `index`; a CPU runs with one thread. Needs
    torch."""
    if kind == "cpu":
        from traincast.benching.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from traincast.benching.cuda import CudaDevice

        return CudaDevice(index)
    raise unknown("device", kind, DEVICES, f"Choose from {', '.join(DEVICES)}.")
