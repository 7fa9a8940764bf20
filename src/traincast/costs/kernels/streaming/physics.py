"""The memory system that streaming kernels share, and their times from first principles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.contract import Calls, estimate_memory_seconds, get_clock_hz, get_pinned_rate
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

START_SECONDS = 2.8e-6
"""Time of a kernel with next to nothing to do: launch on the device, one trip to memory, drain. The smallest
element-wise kernels take 2.8 us in the DLRM traces of V100 and 3.2 in the recommender trace of A100."""
START_SPREAD = 0.25
"""Log-sigma of that start: 2 to 4 us in the traces."""
INTEGER_LANES = 64.0
"""Of an SM since Volta, whatever its cores."""
_L2_OVER_DRAM = 1.25  # an L2 is never slower than the DRAM behind it
_PAGEABLE_SHARE = 0.8  # of the pinned rate, while the copy itself runs
_SORT_SHARE, _SORT_START = 0.62, 9e-6  # one pass of CUB's radix sort on A100, and of a few thousand keys on V100
_PUT_CYCLES = 47.0  # per SM and warp of ATen's indexing_backward_kernel


@dataclass(frozen=True, slots=True)
class MemorySystem:
    """What a device's memory reaches. Rates in bytes per second, sizes in bytes."""

    read_rate: float
    write_rate: float
    l2_rate: float
    l2_bytes: float

    @staticmethod
    def of(
        device: Device, read_share: float, write_share: float, l2_bytes_per_clock: float, l2_share: float
    ) -> MemorySystem:
        """From the shares of the sheet's DRAM rate that reads and writes reach, the L2 bytes an SM moves in one
        clock, and the share of the L2 that one kernel's data can occupy. Only the L2 follows the SM clock."""
        read, write = read_share * device.dram_bandwidth, write_share * device.dram_bandwidth
        return MemorySystem(
            read_rate=read,
            write_rate=write,
            l2_rate=max(l2_bytes_per_clock * device.num_sms * get_clock_hz(device), _L2_OVER_DRAM * max(read, write)),
            l2_bytes=l2_share * device.l2_bytes,
        )

    def seconds(self, bytes_read: FloatArray, bytes_written: FloatArray) -> FloatArray:
        """Time to stream these bytes once, without the kernel's start. Grows with either amount.

        What a kernel reads may still be in the L2; what it writes has to leave it sooner or later.
        """
        footprint = bytes_read + bytes_written
        fill = np.square(np.square(np.square(footprint / self.l2_bytes)))  # the 8th power: a sharp, smooth edge
        resident = 1.0 / (1.0 + fill)
        read = bytes_read * (resident / self.l2_rate + (1.0 - resident) / self.read_rate)
        return np.asarray(read + bytes_written / self.write_rate)


def estimate_lane_seconds(device: Device, lane_cycles: FloatArray) -> FloatArray:
    """Time of this many cycles of one lane, spread over all lanes of the device."""
    return lane_cycles / (device.num_sms * device.cores_per_sm * get_clock_hz(device))


def estimate_overlap_seconds(first: FloatArray, second: FloatArray) -> FloatArray:
    """Time of two activities that hide each other, all but where they are equally long."""
    square, other = first * first, second * second
    return np.asarray(np.sqrt(np.sqrt(square * square + other * other)))


def elementwise_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every byte once."""
    return start + estimate_memory_seconds(_sum_bytes(calls), device, 1.0)


copy_seconds = pool_seconds = elementwise_seconds  # windows overlap in cache


def reduction_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """A tree over blocks costs another trip to memory."""
    return 2.0 * start + estimate_memory_seconds(_sum_bytes(calls), device, 1.0)


def index_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every byte once; sorts are passes, and what is added to rows is a warp each."""
    moved = start + estimate_memory_seconds(_sum_bytes(calls), device, 1.0)
    sort = _SORT_START + estimate_memory_seconds(_sum_bytes(calls), device, _SORT_SHARE)
    warps = calls["elements"] / np.maximum(calls["row_elements"], 1.0) * np.ceil(calls["row_elements"] / 128.0)
    put = start + warps * _PUT_CYCLES / (device.num_sms * get_clock_hz(device))
    return np.where(calls.is_kind("sort"), sort, np.where(calls.is_kind("put"), np.maximum(put, moved), moved))


def memcpy_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """The wire for transfers, memory for copies inside the device."""
    pinned = get_pinned_rate(device)
    wire = np.where(calls.is_kind("h2d_pageable", "d2h_pageable"), _PAGEABLE_SHARE * pinned, pinned)
    inside = estimate_memory_seconds(calls["bytes"] * np.where(calls.is_kind("d2d"), 2.0, 1.0), device, 1.0)
    return np.asarray(0.5 * start + np.where(calls.is_kind("d2d", "memset"), inside, calls["bytes"] / wire))


def _sum_bytes(calls: Calls) -> FloatArray:
    return np.asarray(calls["bytes_read"] + calls["bytes_written"])
