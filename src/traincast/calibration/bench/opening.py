"""Which devices there are, by name."""

from __future__ import annotations

from traincast.calibration.bench.device import Device
from traincast.utils.errors import TraincastError, make_unknown_error

DEVICES = ("cpu", "cuda")


def open_device(kind: str, index: int = 0, locked_mhz: float = 0.0) -> Device:
    """The device of this kind on this machine, of several GPUs number `index`, at the clock it was locked to (0: none);
    a CPU runs with one thread. Needs torch."""
    if kind == "cpu":
        if locked_mhz:
            raise TraincastError("a CPU's clock cannot be locked from here; leave out `clock_mhz`")
        from traincast.calibration.bench.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from traincast.calibration.bench.cuda import CudaDevice

        return CudaDevice(index, locked_mhz)
    raise make_unknown_error("device", kind, DEVICES, f"Choose from {', '.join(DEVICES)}.")
