"""Streaming kernels from first principles: the bytes they move, at the share of the DRAM rate they reach."""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.physics import COPY_SHARE, clock, memory_seconds, pinned_rate
from traincast.hardware.device import Device
from traincast.utils.arrays import FloatArray

_PAGEABLE_SHARE = 0.8  # of the pinned rate, while the copy itself runs
_SORT_SHARE, _SORT_START = 0.62, 9e-6  # one pass of CUB's radix sort on A100, and of a few thousand keys on V100
_PUT_CYCLES = 47.0  # per SM and warp of ATen's indexing_backward_kernel


def elementwise_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every byte once."""
    return start + memory_seconds(_both(calls), device)


def copy_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every byte once, at what concatenations reach."""
    return start + memory_seconds(_both(calls), device, COPY_SHARE)


def reduction_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """A tree over blocks costs two more trips to memory."""
    return 2.5 * start + memory_seconds(_both(calls), device, COPY_SHARE)


def pool_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Every byte once: the windows overlap in cache."""
    return start + memory_seconds(_both(calls), device, COPY_SHARE)


def index_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Short runs waste most of each 32-byte sector, though neighbours share them: at most twice the bytes."""
    run = np.maximum(calls["row_elements"] * calls.item_bytes(), 1.0)
    waste = np.clip(32.0 / run, 1.0, 2.0)
    moved = start + memory_seconds(_both(calls) * waste, device, COPY_SHARE)
    sort = _SORT_START + memory_seconds(_both(calls), device, _SORT_SHARE)
    warps = calls["elements"] / np.maximum(calls["row_elements"], 1.0) * np.ceil(calls["row_elements"] / 128.0)
    put = start + warps * _PUT_CYCLES / (device.num_sms * clock(device))
    return np.where(calls.is_kind("sort"), sort, np.where(calls.is_kind("put"), np.maximum(put, moved), moved))


def memcpy_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """The wire for transfers, memory for copies inside the device."""
    pinned = pinned_rate(device)
    wire = np.where(calls.is_kind("h2d_pageable", "d2h_pageable"), _PAGEABLE_SHARE * pinned, pinned)
    inside = memory_seconds(calls["bytes"] * np.where(calls.is_kind("d2d"), 2.0, 1.0), device, COPY_SHARE)
    return np.asarray(0.5 * start + np.where(calls.is_kind("d2d", "memset"), inside, calls["bytes"] / wire))


def _both(calls: Calls) -> FloatArray:
    return np.asarray(calls["bytes_read"] + calls["bytes_written"])
