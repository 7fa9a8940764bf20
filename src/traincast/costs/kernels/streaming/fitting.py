"""How the shared memory system follows from element-wise device times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.model import Measurements
from traincast.costs.kernels.solve import relative_fit
from traincast.costs.kernels.streaming.memory import START_SECONDS, MemorySystem, lane_seconds, overlapped
from traincast.costs.kernels.streaming.parameters import StreamParameters
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError

_BYTES_PER_CLOCK = (10.0, 13.0, 16.0, 20.0, 24.0, 32.0)  # of an SM from its L2, tried; 64 is the width of its port
_L2_SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)  # of the L2 that one kernel's data can occupy, tried
_TELLING_SECONDS = 20e-6  # to fill an L2 from DRAM; smaller ones are over before the host's part is
_LONG_SECONDS = 150e-6  # shorter kernels are measured before the clock has risen, which only arithmetic feels
_POW_CYCLES = np.geomspace(5.0, 400.0, 60)  # tried, 8 % apart


def fit_streams(data: Measurements) -> StreamParameters:
    """Per device, the DRAM shares from what is far larger than the L2; then `pow`; then, for all, the L2.

    Spreads are left at a placeholder; `with_spread` sets them from points the fit has not seen.
    """
    devices, order = list(data.devices), range(len(data.devices))
    rows = [np.flatnonzero(data.device == i) for i in order]
    shares = np.array(
        [_dram_shares(data.calls.take(r), data.seconds[r], d) for r, d in zip(rows, devices, strict=True)]
    )
    pooled = _pool(devices, shares)
    l2 = _fit_l2(data, rows, shares)
    table = np.zeros((len(devices), 4))
    for i in order:
        memory = MemorySystem.of(devices[i], shares[i, 0], shares[i, 1], l2[0], l2[1])
        table[i] = (*shares[i], _fit_pow(data.calls.take(rows[i]), data.seconds[rows[i]], devices[i], memory), 0.02)
    amd = np.array([device.vendor == "amd" for device in devices])
    cycles = [np.median(table[amd == vendor, 2]) if (amd == vendor).any() else 60.0 for vendor in (False, True)]
    most = float(np.max(data.calls["bytes_read"] + data.calls["bytes_written"]))
    return StreamParameters(Chips.of(devices), table, np.array([*pooled, *cycles]), np.array(l2), 0.10, most)


def _dram_shares(calls: Calls, seconds: FloatArray, device: Device) -> tuple[float, float]:
    footprint = calls["bytes_read"] + calls["bytes_written"]
    use = ~calls.is_kind("pow") & (footprint > 1.5 * device.l2_bytes) & (seconds > 4 * START_SECONDS)
    if not use.any():
        raise TraincastError(
            f"no element-wise measurement of '{device.name}' is larger than 1.5 x its L2 and longer than "
            f"{4e6 * START_SECONDS:.0f} us; measure larger shapes, or leave the device out"
        )
    features = np.stack([calls["bytes_read"][use], calls["bytes_written"][use]], axis=1) / device.dram_bandwidth
    target = seconds[use] - START_SECONDS
    inverse = relative_fit(features, target)
    if inverse[1] < 1.0:  # writes cannot outrun the sheet; what they seemed to gain belongs to the reads
        inverse = np.array([relative_fit(features[:, :1], target - features[:, 1])[0], 1.0])
    return float(1 / inverse[0]), float(1 / inverse[1])


def _pool(devices: list[Device], shares: FloatArray) -> list[float]:
    stacked = np.array([device.made_for_computing for device in devices])
    pooled: list[float] = []
    for kind in (False, True):
        chosen = shares[stacked == kind] if (stacked == kind).any() else shares
        # an unseen device gets one share for both directions: how they differ is a trait of the single card
        both = 2.0 / (1.0 / chosen[:, 0] + 1.0 / chosen[:, 1])
        pooled += [float(np.median(both))] * 2
    return pooled


def _fit_l2(data: Measurements, rows: list[npt.NDArray[np.intp]], shares: FloatArray) -> tuple[float, float]:
    """Only footprints near the L2's size tell, and only of an L2 that takes longer to fill than the host to launch."""
    best, chosen = np.inf, (16.0, 0.9)
    for per_clock in _BYTES_PER_CLOCK:
        for share in _L2_SHARES:
            loss = 0.0
            for i, device in enumerate(data.devices):
                if device.l2_bytes < _TELLING_SECONDS * device.dram_bandwidth:
                    continue
                calls, seconds = data.calls.take(rows[i]), data.seconds[rows[i]]
                footprint = calls["bytes_read"] + calls["bytes_written"]
                near = (footprint > 0.4 * device.l2_bytes) & (footprint < 1.5 * device.l2_bytes) & ~calls.is_kind("pow")
                near &= seconds > 4 * START_SECONDS
                memory = MemorySystem.of(device, shares[i, 0], shares[i, 1], per_clock, share)
                predicted = START_SECONDS + memory.seconds(calls["bytes_read"][near], calls["bytes_written"][near])
                loss += float(np.sum(np.minimum(np.abs(np.log(predicted / seconds[near])), 0.5)))
            if loss < best:
                best, chosen = loss, (per_clock, share)
    return chosen


def _fit_pow(calls: Calls, seconds: FloatArray, device: Device, memory: MemorySystem) -> float:
    use = calls.is_kind("pow") & (seconds > _LONG_SECONDS)
    if not use.any():
        return 60.0
    stream = memory.seconds(calls["bytes_read"][use], calls["bytes_written"][use])
    lanes = lane_seconds(device, calls["elements"][use])
    losses = [
        np.median(np.abs(np.log((START_SECONDS + overlapped(stream, cycles * lanes)) / seconds[use])))
        for cycles in _POW_CYCLES
    ]
    return float(_POW_CYCLES[int(np.argmin(losses))])
