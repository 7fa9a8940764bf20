"""Times from first principles for every kernel family: what is used where no fitted model is.

Time is a start plus the longer of arithmetic and memory. Shares of peak are what good kernels achieve, taken from
the V100 (1297 MHz) kernels of two DLRM training traces unless said otherwise; they are not tuned per device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traincast.arrays import FloatArray
from traincast.kernels.call import COMPUTE_TYPES, Calls, Estimate
from traincast.kernels.traffic import embedding_seconds
from traincast.platform.device import Device

SIGMA = 0.25
_SIGMA = {"conv": 0.5, "attention": 0.45}  # algorithms differ more than shapes say: median errors of 37 % and 32 %
_START_SECONDS = {"nvidia": 2e-6, "amd": 5e-6}
_DRAM_SHARE = 0.88  # relu and its backward at 2048 x 1024
_COPY_SHARE = 0.79  # concatenation, both papers
_L2_BYTES_PER_CLOCK = 21.0  # per SM
_PCIE_GBS = {3: 12.4, 4: 24.0, 5: 48.0}  # pinned; generation 3 measured, the others by its share of the wire rate
_PAGEABLE_SHARE = 0.8  # of the pinned rate, while the copy itself runs
# share of peak inside a full wave, by (rows, columns) of the tile a block computes
_TILES = ((128, 128, 0.88), (128, 64, 0.86), (64, 64, 0.78), (128, 32, 0.76), (32, 32, 0.50))
_TENSOR_CORES = ("tf32", "fp16", "bf16", "fp8")
_TENSOR_SHARE = 0.80  # of the tile's share: operands arrive late
_WINOGRAD = 1.5  # fewer multiplications of 3x3 windows at stride 1, after the cost of its transforms
_CONV_SHARE = 0.85  # of a plain product of the same size
_ATTENTION_SHARE = {"forward": 0.55, "backward": 0.42}
_SORT_SHARE, _SORT_START = 0.62, 9e-6  # one pass of CUB's radix sort on A100, and of a few thousand keys on V100
_PUT_CYCLES = 47.0  # per SM and warp of ATen's indexing_backward_kernel


class Roofline:
    """An estimate for any call of any family on any device."""

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call, never below the start of a kernel; nothing counts as in domain."""
        start = _START_SECONDS.get(device.vendor, 2e-6)
        seconds = np.maximum(_SECONDS[calls.family.name](calls, device, start), 0.5 * start)
        sigma = np.full(len(calls), _SIGMA.get(calls.family.name, SIGMA))
        return Estimate(seconds, sigma, np.zeros(len(calls), dtype=np.bool_))


def _clock(device: Device) -> float:
    return 1e6 * (device.clock_mhz or device.boost_clock_mhz)


def _memory(nbytes: FloatArray, device: Device, share: float = _DRAM_SHARE) -> FloatArray:
    """Time to move bytes once: at the L2's rate where they fit it, else at the DRAM's."""
    dram = share * device.dram_bandwidth
    l2 = max(_L2_BYTES_PER_CLOCK * device.num_sms * _clock(device), 1.25 * dram)
    kept = np.clip(2.0 - nbytes / (0.5 * device.l2_bytes), 0.0, 1.0)
    return np.asarray(kept * nbytes / l2 + (1.0 - kept) * nbytes / dram)


def _both(calls: Calls) -> FloatArray:
    return np.asarray(calls["bytes_read"] + calls["bytes_written"])


def _rate(calls: Calls, device: Device) -> FloatArray:
    """Flop/s a long kernel sustains, by compute type."""
    rates = {name: device.sustained(name) for name in COMPUTE_TYPES}
    shares = {name: _TENSOR_SHARE if name in _TENSOR_CORES and name in device.peak_flops else 1.0 for name in rates}
    return calls.per_compute({name: rates[name] * shares[name] for name in rates}, device.sustained("fp32"))


def _product(
    batch: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray, rate: FloatArray, device: Device
) -> FloatArray:
    """Arithmetic time of a matrix product: whole waves of tiles, the depth split where tiles are few; best tile."""
    best = np.full(np.shape(m), np.inf)
    for rows, cols, share in _TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
        splits = np.clip(np.floor(device.num_sms / tiles), 1.0, np.maximum(1.0, k // 128))
        waves = np.ceil(tiles * splits / device.num_sms)
        seconds = waves * 2.0 * rows * cols * (k / splits) * device.num_sms / (share * rate)
        best = np.minimum(best, seconds)
    return best


def _gemm(calls: Calls, device: Device, start: float) -> FloatArray:
    batch, m, n, k = calls["batch"], calls["m"], calls["n"], calls["k"]
    nbytes = batch * (m * k + k * n + m * n) * calls.item_bytes()
    arithmetic = _product(batch, m, n, k, _rate(calls, device), device)
    return np.asarray(start + np.maximum(arithmetic, _memory(nbytes, device)))


def _conv(calls: Calls, device: Device, start: float) -> FloatArray:
    """Implicit matrix product over output positions (data: input positions; weights: their gradients)."""
    groups, batch = calls["groups"], calls["batch"]
    channels, filters = calls["in_channels"] / groups, calls["out_channels"] / groups
    window = calls["kernel_h"] * calls["kernel_w"]
    out = np.ones(len(calls))
    for side in ("h", "w"):
        reach = calls[f"dilation_{side}"] * (calls[f"kernel_{side}"] - 1.0) + 1.0
        out = out * (np.floor((calls[f"in_{side}"] + 2 * calls[f"pad_{side}"] - reach) / calls[f"stride_{side}"]) + 1.0)
    positions, pixels = batch * out, batch * calls["in_h"] * calls["in_w"]
    data, weights = calls.is_kind("backward_data"), calls.is_kind("backward_weights")
    m = np.where(weights, filters, np.where(data, pixels, positions))
    n = np.where(weights, channels * window, np.where(data, channels, filters))
    k = np.where(weights, positions, np.where(data, filters * window * positions / pixels, channels * window))
    square = (window == 9) & (calls["stride_h"] * calls["stride_w"] == 1) & (groups == 1) & calls.is_compute("fp32")
    gain = np.where(square & ~weights, _WINOGRAD, 1.0) * _CONV_SHARE
    arithmetic = _product(groups, m, n, np.maximum(k, 1.0), _rate(calls, device), device) / gain
    sizes = pixels * channels * groups + positions * filters * groups + channels * filters * window * groups
    return np.asarray(start + np.maximum(arithmetic, _memory(sizes * calls.item_bytes(), device)))


def _elementwise(calls: Calls, device: Device, start: float) -> FloatArray:
    return start + _memory(_both(calls), device)


def _copy(calls: Calls, device: Device, start: float) -> FloatArray:
    return start + _memory(_both(calls), device, _COPY_SHARE)


def _index(calls: Calls, device: Device, start: float) -> FloatArray:
    """Short runs waste most of each 32-byte sector, though neighbours share them: at most twice the bytes."""
    run = np.maximum(calls["row_elements"] * calls.item_bytes(), 1.0)
    waste = np.clip(32.0 / run, 1.0, 2.0)
    moved = start + _memory(_both(calls) * waste, device, _COPY_SHARE)
    sort = _SORT_START + _memory(_both(calls), device, _SORT_SHARE)
    warps = calls["elements"] / np.maximum(calls["row_elements"], 1.0) * np.ceil(calls["row_elements"] / 128.0)
    put = start + warps * _PUT_CYCLES / (device.num_sms * _clock(device))
    return np.where(calls.is_kind("sort"), sort, np.where(calls.is_kind("put"), np.maximum(put, moved), moved))


def _reduction(calls: Calls, device: Device, start: float) -> FloatArray:
    """A tree over blocks costs two more trips to memory."""
    return 2.5 * start + _memory(_both(calls), device, _COPY_SHARE)


def _softmax(calls: Calls, device: Device, start: float) -> FloatArray:
    passes = np.where(calls.is_kind("backward", "log_backward"), 3.0, 2.0) + (calls["cols"] > 1024)
    return start + _memory(passes * calls["rows"] * calls["cols"] * calls.item_bytes(), device)


_NORM_PASSES = {
    "layer_forward": 2.0, "layer_backward": 3.0, "layer_backward_weights": 2.0,
    "batch_forward": 3.0, "batch_backward": 5.0, "batch_inference": 2.0,
}  # fmt: skip


def _norm(calls: Calls, device: Device, start: float) -> FloatArray:
    passes = np.array([_NORM_PASSES[kind] for kind in calls.family.kinds])[calls.kind]
    return 1.5 * start + _memory(passes * calls["rows"] * calls["cols"] * calls.item_bytes(), device, _COPY_SHARE)


def _pool(calls: Calls, device: Device, start: float) -> FloatArray:
    return start + _memory(_both(calls), device, _COPY_SHARE)


def _attention(calls: Calls, device: Device, start: float) -> FloatArray:
    """Two products forward, five backward; a causal mask skips half."""
    pairs = calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * (1.0 - 0.5 * calls["causal"])
    backward = calls.is_kind("backward")
    flops = pairs * calls["head_dim"] * np.where(backward, 10.0, 4.0)
    share = np.array([_ATTENTION_SHARE[kind] for kind in calls.family.kinds])[calls.kind]
    queries = calls["batch"] * calls["q_heads"] * calls["q_len"]
    keys = calls["batch"] * calls["kv_heads"] * calls["kv_len"]
    nbytes = np.where(backward, 4.0, 2.0) * (queries + keys) * calls["head_dim"] * calls.item_bytes()
    return np.asarray(2.0 * start + np.maximum(flops / (share * _rate(calls, device)), _memory(nbytes, device)))


def _memcpy(calls: Calls, device: Device, start: float) -> FloatArray:
    pinned = 1e9 * _PCIE_GBS.get(device.pcie_gen, _PCIE_GBS[5 if device.pcie_gen > 5 else 3])
    wire = np.where(calls.is_kind("h2d_pageable", "d2h_pageable"), _PAGEABLE_SHARE * pinned, pinned)
    inside = _memory(calls["bytes"] * np.where(calls.is_kind("d2d"), 2.0, 1.0), device, _COPY_SHARE)
    return np.asarray(0.5 * start + np.where(calls.is_kind("d2d", "memset"), inside, calls["bytes"] / wire))


def _embedding(calls: Calls, device: Device, start: float) -> FloatArray:
    return embedding_seconds(calls, device)


_SECONDS: dict[str, Callable[[Calls, Device, float], FloatArray]] = {
    "gemm": _gemm, "conv": _conv, "elementwise": _elementwise, "copy": _copy, "index": _index,
    "reduction": _reduction, "softmax": _softmax, "norm": _norm, "pool": _pool, "attention": _attention,
    "embedding": _embedding, "memcpy": _memcpy,
}  # fmt: skip
