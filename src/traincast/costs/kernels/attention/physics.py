"""What fused attention asks of a GPU: tiles of GEMMs, exponentials and traffic, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.contract import COMPUTE_TYPES, Calls, estimate_memory_seconds
from traincast.hardware.device import AMPERE, BLACKWELL, HOPPER, Device
from traincast.utils.arrays import FloatArray

FUSED_TYPES = ("fp16", "bf16")
_EXPONENTIALS = 16.0  # that an SM makes per clock,
_EXPONENTIALS_ULTRA = 32.0  # and twice as many on Blackwell Ultra (data sheet: 10.7 against 5 tera a second)
_BLACKWELL_ULTRA = 10.3  # compute capability
_CACHE_THREADS = 512.0  # most threads of the block that copies one token's keys and values
_KEPT = 1.4  # a call of this many times the L2 within reach finds half of its data there
WARM_SECONDS = 3.5e-3  # seconds at peak rate after which half of the drop of the clock is there
BACKWARD_FEATURES = (
    "start", "products", "longest block", "heat", "heads beyond 128", "exponentials", "traffic",
)  # fmt: skip
# bytes of an element: queries, output, its gradient and that of queries once; sums of the latter in fp32 are cleared,
# written and read. Keys, values and their gradients once
_QUERY_BYTES, _KEY_BYTES = 4 * 2.0 + 3 * 4.0, 4 * 2.0
_TILE = 128.0  # keys of a block, and queries of a step
_PRODUCTS = 10.0  # flop for each pair of positions and element of a head: five GEMMs, one of them made again


@dataclass(frozen=True, slots=True)
class Kernel:
    """Tiles of a kernel by head dimension: entry i serves dimensions up to `dims[i]`, the last one all others.

    `queries` of a block, `keys` of a step, `packed` where the heads that share keys fill a block together.
    """

    dims: tuple[float, ...]
    queries: tuple[float, ...]
    keys: tuple[float, ...]
    packed: tuple[bool, ...]


KERNELS = {
    "flash2": Kernel((64, 128), (64, 64, 64), (256, 128, 64), (False, False, False)),
    "flash3": Kernel((64, 128, 192, 256), (192, 128, 128, 128, 64), (128, 128, 112, 80, 64), (*[True] * 4, False)),
    "tensorrt": Kernel((128,), (256, 128), (128, 128), (False, False)),
}


KERNEL_NAMES = tuple(KERNELS)


FEATURES = (
    "start", "waves", "GEMMs by waves", "products", "exponentials", "longest block", "memory", "memory beyond L2",
    "heat", "heads beyond 128", "heads beyond 256",
)  # fmt: skip


def choose_attention_kernel(device: Device) -> str:
    """Name of the kernel that was measured on cards of this generation; FlashAttention 2 on earlier and other ones, and
    on chips made for graphics."""
    if not (device.is_capability_at_least(HOPPER) and device.made_for_computing):
        return "flash2"
    return "tensorrt" if device.is_capability_at_least(BLACKWELL) else "flash3"


def get_exponential_rate(device: Device) -> float:
    """Exponentials per second of one SM."""
    ultra = device.is_capability_at_least(_BLACKWELL_ULTRA) and device.made_for_computing
    return (_EXPONENTIALS_ULTRA if ultra else _EXPONENTIALS) * 1e6 * device.effective_clock_mhz


def compute_attention_features(calls: Calls, device: Device) -> FloatArray:
    """Seconds-like columns of the kernel itself, in the order of `FEATURES`."""
    kernel, sms, clock = (
        KERNELS[choose_attention_kernel(device)],
        float(device.num_sms),
        1e6 * device.effective_clock_mhz,
    )
    queries, keys, dim = calls["q_len"], np.maximum(calls["kv_len"], 1.0), calls["head_dim"]
    size = np.searchsorted(np.array(kernel.dims), dim)
    rows, step = np.array(kernel.queries)[size], np.array(kernel.keys)[size]
    shared = np.where(np.array(kernel.packed)[size], calls["q_heads"] / np.maximum(calls["kv_heads"], 1.0), 1.0)
    load = calls["batch"] * calls["q_heads"] / shared * np.ceil(queries * shared / rows) / sms
    waves = np.ceil(load)
    most = np.ceil(keys / step)
    steps = np.where(calls["causal"] > 0, np.minimum(_count_causal_steps(keys, rows / shared, step), most), most)
    simulated = np.maximum(np.maximum(load, 1.0) * steps, most)
    rate = (
        calls.per_compute(
            {name: device.get_sustained_flops(name) for name in FUSED_TYPES}, device.get_sustained_flops("fp16")
        )
        / sms
    )
    products, exponentials = 4.0 * rows * step * dim / rate, rows * step / get_exponential_rate(device)
    total = products * simulated
    warm = np.square(total / WARM_SECONDS)
    moved, beyond = _estimate_traffic(calls, device)
    columns = [
        np.full(len(calls), 1e3 / clock), 1e3 / clock * waves, products * waves * steps, total,
        exponentials * waves * steps, (products + exponentials) * most, moved, moved * beyond,
        total * warm / (1.0 + warm), np.where(dim > 128, total, 0.0), np.where(dim > 256, total, 0.0),
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def count_query_elements(calls: Calls) -> FloatArray:
    """Elements of the queries."""
    return calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["head_dim"]


def compute_cache_features(calls: Calls, device: Device) -> FloatArray:
    """Seconds-like columns of the copy of keys and values into a server's cache: blocks of threads, and bytes."""
    tokens, width = calls["batch"] * calls["kv_len"], calls["kv_heads"] * calls["head_dim"]
    clock = 1e6 * device.effective_clock_mhz
    blocks = tokens * np.minimum(width, _CACHE_THREADS) / _CACHE_THREADS / device.num_sms
    _, beyond = _estimate_traffic(calls, device)
    copied = 2.0 * tokens * width * calls.item_bytes() / device.dram_bandwidth
    return np.stack([1e3 / clock * blocks, copied * beyond], axis=1)


def _count_causal_steps(keys: FloatArray, rows: FloatArray, step: FloatArray) -> FloatArray:
    """Tiles of `step` keys that an average block of `rows` queries sees under a causal mask.

    Exact where one is a multiple of the other; else the rounding up of a block's last tile is left out.
    """
    unit = np.maximum(rows, step)
    full = np.floor(keys / unit)
    mean = (full + 1.0) * (1.0 - 0.5 * full * unit / keys)  # of ceil(position / unit) over all positions
    return np.asarray(mean * unit / step)


def _estimate_traffic(calls: Calls, device: Device) -> tuple[FloatArray, FloatArray]:
    """Seconds of DRAM that queries, output, keys and values are worth, and the share that L2 does not hold.

    The measured calls repeat on the same data. Chips with stacked memory have an L2 of two halves, each of which keeps
    a copy of what its SMs read.
    """
    vector = 2.0 * calls["batch"] * calls["head_dim"] * calls.item_bytes()
    query, key = vector * calls["q_heads"] * calls["q_len"], vector * calls["kv_heads"] * calls["kv_len"]
    reach = _KEPT * device.l2_bytes * (0.5 if device.made_for_computing else 1.0)
    ratio = np.square(np.square((query + 2.0 * key) / reach))
    return (query + key) / device.dram_bandwidth, ratio / (1.0 + ratio)


def compute_attention_backward_features(calls: Calls, device: Device) -> FloatArray:
    """Seconds-like columns, in the order of `BACKWARD_FEATURES`."""
    sms, dim = float(device.num_sms), calls["head_dim"]
    rate = (
        calls.per_compute(
            {name: device.get_sustained_flops(name) for name in FUSED_TYPES}, device.get_sustained_flops("fp16")
        )
        / sms
    )
    turn = _PRODUCTS * _TILE * _TILE * dim / rate
    most = np.ceil(calls["q_len"] / _TILE)
    blocks = calls["batch"] * calls["q_heads"] * np.ceil(calls["kv_len"] / _TILE)
    # a causal mask leaves half of the tiles, and those on the diagonal
    steps = np.where(calls["causal"] > 0, 0.5 * (most + 1.0), most)
    total = turn * blocks * steps / sms
    warm = np.square(total / WARM_SECONDS)
    queries, keys = calls["q_heads"] * calls["q_len"], calls["kv_heads"] * calls["kv_len"]
    moved = calls["batch"] * dim * (_QUERY_BYTES * queries + _KEY_BYTES * keys)
    columns = [
        np.full(len(calls), 1e3 / (1e6 * device.effective_clock_mhz)), total, turn * most,
        total * warm / (1.0 + warm), np.where(dim > 128, total, 0.0),
        _TILE * _TILE * blocks * steps / (sms * get_exponential_rate(device)), moved / device.dram_bandwidth,
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def get_attention_peak(device: Device, compute: str) -> float:
    """Flop/s that no attention kernel exceeds: since Ampere its products in fp32 may be three in TF32 each."""
    peak = device.get_product_flops(compute)
    return max(peak, device.get_peak_flops("tf32") / 3.0) if device.is_capability_at_least(AMPERE) else peak


def attention_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """Two GEMMs forward, five backward; a causal mask skips half."""
    pairs = calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * (1.0 - 0.5 * calls["causal"])
    backward = calls.is_kind("backward", "efficient_backward")
    flops = pairs * calls["head_dim"] * np.where(backward, 10.0, 4.0)
    rate = calls.per_compute({name: get_attention_peak(device, name) for name in COMPUTE_TYPES}, np.inf)
    queries = calls["batch"] * calls["q_heads"] * calls["q_len"]
    keys = calls["batch"] * calls["kv_heads"] * calls["kv_len"]
    nbytes = np.where(backward, 4.0, 2.0) * (queries + keys) * calls["head_dim"] * calls.item_bytes()
    return np.asarray(start + np.maximum(flops / rate, estimate_memory_seconds(nbytes, device, 1.0)))
