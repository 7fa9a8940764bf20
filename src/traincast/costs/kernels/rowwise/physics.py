"""What kernels over rows ask of a GPU: blocks or warps per row, iterations, traffic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traincast.costs.kernels.contract import Calls, estimate_memory_seconds, get_bus_gain, get_clock_hz
from traincast.hardware.device import ADA, TURING, VOLTA, Device
from traincast.utils.arrays import FloatArray

Features = Callable[[Device, FloatArray, FloatArray, FloatArray], FloatArray]
"""Seconds-like columns of kernels over (device, rows, columns, bytes of an element)."""
SOFTMAX_WARP_COLS = 1024  # PyTorch keeps rows up to this width in the registers of one warp
_ITERATIONS = 9  # iteration counts told apart; beyond, latency grows in proportion
_OVERFLOW = np.array([-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0])  # log2 of (rows in flight / caches that keep them)
# an SM's resident threads and blocks (CUDA programming guide) where they are not 2048 and 32
_THREADS = {TURING: 1024, ADA: 1536}
_BLOCKS = {TURING: 16, ADA: 24}
# reads and writes of a tensor the size of the input, as the kernels' code has them
_NORM_PASSES = {
    "layer_forward": 2.0, "layer_backward": 3.0, "layer_backward_weights": 2.0,
    "batch_forward": 3.0, "batch_backward": 5.0, "batch_inference": 2.0, "batch_statistics": 1.0,
    "batch_backward_own": 5.0, "batch_forward_last": 3.0, "batch_backward_last": 5.0, "layer_backward_columns": 2.0,
}  # fmt: skip


def compute_layer_norm_features(device: Device, rows: FloatArray, cols: FloatArray, item: FloatArray) -> FloatArray:
    """Seconds-like features of PyTorch's vectorised layer norm: blocks of 4 warps, 4 values per thread."""
    threads = 256.0 if device.vendor == "amd" else 128.0
    return np.stack(_compute_block_features(device, rows, cols, item, np.full(len(rows), threads)), axis=1)


def compute_softmax_features(device: Device, rows: FloatArray, cols: FloatArray, item: FloatArray) -> FloatArray:
    """Seconds-like features of PyTorch's softmax: a warp per row when narrow, a block per row when wide."""
    wide = (cols > SOFTMAX_WARP_COLS).astype(np.float64)
    if device.vendor == "amd":
        threads = np.full(len(rows), 1024.0)
    else:
        threads = np.where(cols < 1032, 128.0, np.where(cols < 2064, 256.0, 512.0))
    block = _compute_block_features(device, rows, cols, item, threads)
    stream, waves = block[0], block[8]
    odd = (cols % 4 != 0).astype(np.float64)
    block += [stream * odd, waves * odd, rows / (device.num_sms * get_clock_hz(device))]
    narrow = 1.0 - wide
    features = [column * wide for column in block] + [
        column * narrow for column in _compute_warp_features(device, rows, cols, item, stream, odd)
    ]
    return np.stack(features, axis=1)


def count_in_flight_bytes(device: Device, cols: FloatArray, item: FloatArray, threads: FloatArray) -> FloatArray:
    """Bytes of the rows that are being worked on at one time."""
    return device.num_sms * _count_blocks_per_sm(device, threads) * cols * item


def estimate_stream_seconds(device: Device, rows: FloatArray, cols: FloatArray, item: FloatArray) -> FloatArray:
    """Time to move every value once, at the share of the DRAM rate that its kind of memory reaches."""
    share = 0.87 if device.made_for_computing else 0.75 * get_bus_gain(device)  # medians of the element-wise fit
    return rows * cols * item / (share * device.dram_bandwidth)


def _count_cache_bytes(device: Device) -> float:
    """Bytes of the caches that keep a row for its second pass: the L2, and the first level of every SM. That is one
    with shared memory since Volta; before, about half as large beside it, on AMD's chips a quarter."""
    share = 0.25 if device.vendor == "amd" else 0.5 if device.is_capability_below(VOLTA) else 1.0
    return device.l2_bytes + share * device.num_sms * device.smem_per_sm_bytes


def _compute_block_features(
    device: Device, rows: FloatArray, cols: FloatArray, item: FloatArray, threads: FloatArray
) -> list[FloatArray]:
    stream = estimate_stream_seconds(device, rows, cols, item)
    overflow = np.log2(count_in_flight_bytes(device, np.maximum(cols, 1.0), item, threads) / _count_cache_bytes(device))
    rise = [
        np.clip((overflow - low) / (high - low), 0.0, 1.0)
        for low, high in zip(_OVERFLOW[:-1], _OVERFLOW[1:], strict=True)
    ]
    waves = rows / (device.num_sms * _count_blocks_per_sm(device, threads))
    whole = np.ceil(waves) / get_clock_hz(device)
    iterations = np.ceil(cols / (4.0 * threads))
    features = [stream, *(stream * step for step in rise), waves / get_clock_hz(device), whole]
    for count in range(1, _ITERATIONS + 1):
        if count < _ITERATIONS:
            here = (iterations == count).astype(np.float64)
        else:
            here = np.where(iterations >= count, iterations / count, 0.0)
        features += [waves / get_clock_hz(device) * here, whole * here]
    return features


def _compute_warp_features(
    device: Device, rows: FloatArray, cols: FloatArray, item: FloatArray, stream: FloatArray, odd: FloatArray
) -> list[FloatArray]:
    padded = 2.0 ** np.ceil(np.log2(np.maximum(cols, 1.0)))  # a warp works on the next power of two
    cycles = get_clock_hz(device)
    work = rows * padded / (device.num_sms * device.cores_per_sm * cycles)
    middle, upper = (cols > 256).astype(np.float64), (cols > 512).astype(np.float64)
    return [
        stream, stream * odd, stream * middle, stream * upper, work, work * middle, work * upper,
        rows / (device.num_sms * cycles), np.ceil(rows / (device.num_sms * 64.0)) / cycles,
    ]  # fmt: skip


def _count_blocks_per_sm(device: Device, threads: FloatArray) -> FloatArray:
    resident = np.floor(_THREADS.get(device.compute_capability, 2048) / threads)
    return np.clip(resident, 1.0, _BLOCKS.get(device.compute_capability, 32))


def softmax_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """One read and one write, a second read backwards."""
    passes = np.where(calls.is_kind("backward", "log_backward"), 3.0, 2.0)
    return start + estimate_memory_seconds(passes * calls["rows"] * calls["cols"] * calls.item_bytes(), device, 1.0)


def norm_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """As many passes over the rows as the kind of norm makes."""
    passes = np.array([_NORM_PASSES[kind] for kind in calls.family.kinds])[calls.kind]
    return start + estimate_memory_seconds(passes * calls["rows"] * calls["cols"] * calls.item_bytes(), device, 1.0)
