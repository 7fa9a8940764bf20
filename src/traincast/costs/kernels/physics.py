"""What every roofline is made of: clocks, memory rates, arithmetic rates, waves of tiles.

Shares of peak are what good kernels achieve, taken from the V100 (1297 MHz) kernels of two DLRM training traces unless
said otherwise; they are not tuned per device.
"""

from __future__ import annotations

import numpy as np

from traincast.costs.kernels.call import COMPUTE_TYPES, Calls
from traincast.hardware.device import TURING, VOLTA, Device
from traincast.utils.arrays import FloatArray

DRAM_SHARE = 0.88  # relu and its backward at 2048 x 1024
COPY_SHARE = 0.79  # concatenation, both papers
_L2_BYTES_PER_CLOCK = 21.0  # per SM
# share of peak inside a full wave, by (rows, columns) of the tile a block computes
_TILES = ((128, 128, 0.88), (128, 64, 0.86), (64, 64, 0.78), (128, 32, 0.76), (32, 32, 0.50))
WAITING_SHARE = 0.98
"""Of the rate with fp32 accumulation where matrix units multiply faster and wait for their own sums: OPT's layers on
RTX 3090 and 2080 Ti reach 69.8 of 71.2 and 53.4 of 53.8 TFLOPS (ops_forward_backward), A100, which does not, 0.80."""
PCIE_GBS = {3: 12.4, 4: 24.0, 5: 48.0}
HOST_LINK_SHARE = 0.75  # of a link other than PCIe (NVLink-C2C), as those are of the wire's; assumed
"""Gigabytes per second from or to pinned host memory by PCIe generation: 3 measured, others by the wire's rate."""
_NO_ECC_GAIN = 1.21  # 0.91 of the sheet's rate: Triton's softmax of 2048 x 4096 in fp32 on RTX 3090 (liger_ops)
# of what V100's streams reach: 0.74 of the sheet on P100 and 0.80 on TITAN Xp, where V100 has 0.91 (devices.csv); 0.75
# where check bits are on the bus
_HINDERED = 0.83
_TENSOR_CORES = ("tf32", "fp16", "bf16", "fp8")
_TENSOR_SHARE = 0.80  # of the tile's share: operands arrive late


def get_bus_gain(device: Device) -> float:
    """How much more of the sheet's DRAM rate streams reach than on the measured cards with GDDR, whose check bits take
    part of the bus: 0.91 against 0.75. Pascal's cards without them gain nothing (TITAN Xp: 0.80)."""
    free = device.is_capability_at_least(TURING) and not (device.made_for_computing or device.inline_ecc)
    return _NO_ECC_GAIN if free else 1.0


def get_dram_gain(device: Device) -> float:
    """What streams reach of the sheet's DRAM rate, over that of stacked memory since Volta: less on Pascal,
    and with GDDR whose check bits are on the bus."""
    stacked = device.made_for_computing and not device.is_capability_below(VOLTA)
    return 1.0 if stacked or get_bus_gain(device) > 1.0 else _HINDERED


def get_clock_hz(device: Device) -> float:
    """Cycles per second of an SM: the clock it is locked to, else boost."""
    return 1e6 * (device.clock_mhz or device.boost_clock_mhz)


def estimate_memory_seconds(nbytes: FloatArray, device: Device, share: float = DRAM_SHARE) -> FloatArray:
    """Time to move bytes once: at the L2's rate where they fit it, else at the DRAM's."""
    dram = share * device.dram_bandwidth
    l2 = max(_L2_BYTES_PER_CLOCK * device.num_sms * get_clock_hz(device), 1.25 * dram)
    kept = np.clip(2.0 - nbytes / (0.5 * device.l2_bytes), 0.0, 1.0)
    return np.asarray(kept * nbytes / l2 + (1.0 - kept) * nbytes / dram)


def get_pinned_rate(device: Device) -> float:
    """Bytes per second from or to pinned host memory, in one direction, while all that share the link copy."""
    pcie = 1e9 * PCIE_GBS.get(device.pcie_gen, PCIE_GBS[5 if device.pcie_gen > 5 else 3])
    return max(pcie, HOST_LINK_SHARE * device.host_link_bandwidth) / device.host_sharers


def get_flop_rate(calls: Calls, device: Device) -> FloatArray:
    """Flop/s a long kernel sustains, by compute type."""
    rates = {name: device.get_sustained_flops(name) for name in COMPUTE_TYPES}
    shares = {name: _TENSOR_SHARE if name in _TENSOR_CORES and name in device.peak_flops else 1.0 for name in rates}
    return calls.per_compute({name: rates[name] * shares[name] for name in rates}, device.get_sustained_flops("fp32"))


def estimate_gemm_arithmetic_seconds(
    batch: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray, rate: FloatArray, device: Device
) -> FloatArray:
    """Arithmetic time of a GEMM: whole waves of tiles, the depth split where tiles are few; best tile."""
    best = np.full(np.shape(m), np.inf)
    for rows, cols, share in _TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
        splits = np.clip(np.floor(device.num_sms / tiles), 1.0, np.maximum(1.0, k // 128))
        waves = np.ceil(tiles * splits / device.num_sms)
        seconds = waves * 2.0 * rows * cols * (k / splits) * device.num_sms / (share * rate)
        best = np.minimum(best, seconds)
    return best
