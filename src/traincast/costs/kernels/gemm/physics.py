"""What a GEMM asks of a GPU: tiles spread over SMs in waves, bytes through DRAM, and when each binds.

An engine is one kind of arithmetic unit with the tiles its library offers. It gives every GEMM a time from
physics alone, and the numbers from which a small network learns what physics leaves out (which tile the library
picks, how well a tile runs, what alignment costs).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import (
    COMPUTE_TYPES,
    Calls,
    estimate_memory_seconds,
)
from traincast.hardware.device import AMPERE, BLACKWELL, Device
from traincast.utils.arrays import FloatArray

DRAM_SHARE = 0.82
"""Share of the sheet's DRAM rate that streaming kernels reach, the mean over the measured cards."""
_SPLIT_DEPTH = 256.0  # a library splits the contraction only into slices at least this deep
_HIDDEN = 0.8  # share of the shorter of arithmetic and traffic that hides behind the longer
# SMs that issue one instruction per lane group: 64 of about 80 slots of a tile's inner loop are FMA. Set with the
# H100's and L4's large GEMMs in view, see docs/evidence/kernels.md
_ISSUE_SHARE = 0.8
_TRAFFIC_POWER = 0.5  # share of the power limit that DRAM takes at full rate; set with L4 in view, see the docs
_HEATING_SECONDS = 1e-3  # kernels about this long are half way from boost to the clock their power allows


@dataclass(frozen=True, slots=True)
class Engine:
    """A kind of arithmetic unit and its library.

    `tiles` are (columns, rows) of the output a block computes, `resident` the blocks of each that share an SM,
    `tile_overhead` the tile intensity (elements) at which half of the rate is lost, `start_seconds` what an empty
    kernel takes, `linear_only` whether only single GEMMs laid out as in a linear layer were measured: then a
    batch is seen as one tall GEMM, and other layouts as that one. `power_limited` says that the sustained clock of
    a card is the one at which this engine uses up its power.
    `most` bounds (rows, columns, depth) of what was measured: beyond it only physics scales. `visits` is how many
    measurements, repeats counted, a training shows a network, `nets` how many networks are averaged. `tail` is the log
    error beyond which one of many measurements counts ever less: it may come from another clock state, or from a kernel
    chosen by another rule.
    """

    name: str
    tiles: tuple[tuple[int, int], ...]
    resident: tuple[int, ...]
    tile_overhead: float
    start_seconds: float
    linear_only: bool
    most: tuple[float, float, float]
    visits: float
    power_limited: bool = False
    nets: int = 1
    tail: float = np.inf

    @property
    def vector_loads(self) -> bool:
        """Whether its best kernels want every row of an operand to start at a multiple of 16 bytes."""
        return self.name in ("half", "fp8", "fp8_block", "fp8_graphics")

    @property
    def least_seconds(self) -> float:
        """What no correction touches: three quarters of an empty kernel."""
        return 0.75 * self.start_seconds


# that the library offers
_SIMT_TILES = ((128, 32), (32, 128), (64, 64), (128, 64), (128, 128), (32, 32))


# that the library offers
_TENSOR_TILES = ((32, 16), (64, 16), (64, 32), (64, 64), (128, 64), (64, 128), (128, 128), (128, 256), (256, 128))


# numbers set by hand and on validation shapes, see docs/evidence/kernels.md
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "simt", _SIMT_TILES, (2, 2, 8, 4, 2, 8), 8.0, 5e-6, False, (8192, 65536, 65536), 6e6,
            power_limited=True, nets=3, tail=0.2,
        ),
        Engine("half", _TENSOR_TILES, (1,) * 9, 16.0, 2e-6, True, (32768, 65536, 65536), 5e6),
        Engine("fp8", _TENSOR_TILES, (1,) * 9, 16.0, 2e-6, True, (32768, 65536, 65536), 4e6),
        # fitted on a sample of the Blackwell table: fewer visits do
        Engine("fp8_block", _TENSOR_TILES, (1,) * 9, 16.0, 2e-6, True, (32768, 65536, 65536), 1e6),
        Engine("fp8_graphics", _TENSOR_TILES, (1,) * 9, 16.0, 2e-6, True, (32768, 65536, 65536), 1e6),
        Engine("fp4", _TENSOR_TILES, (1,) * 9, 16.0, 2e-6, True, (32768, 65536, 65536), 1e6),
        Engine("amd", _SIMT_TILES, (1,) * 6, 8.0, 5e-6, False, (65536, 65536, 65536), 2e6),
    )
}  # fmt: skip


_BATCHED_MOST = 2048.0  # batched GEMMs were measured up to 1,025 in every dimension


HALF = ("bf16", "fp16", "tf32")


def choose_engine(device: Device, compute: str) -> Engine:
    """The engine that computes in this type on this device; a type without matrix units runs on the cores."""
    if device.vendor == "amd":
        return ENGINES["amd"]
    if compute in device.peak_flops and compute in HALF:
        return ENGINES["half"]
    if compute == "fp4" and compute in device.peak_flops:
        return ENGINES["fp4"]
    if compute in ("fp8", "fp8_block") and "fp8" in device.peak_flops:
        if not device.is_capability_at_least(BLACKWELL):
            return ENGINES["fp8"]
        plain = "fp8" if device.made_for_computing else "fp8_graphics"
        return ENGINES["fp8_block" if compute == "fp8_block" else plain]
    return ENGINES["simt"]


def get_engine_rate(device: Device, compute: str) -> float:
    """Flop/s of a GEMM with ideal tiles at the clock the device holds."""
    if device.vendor == "amd" and compute == "fp32":
        return device.get_sustained_flops("fp32_matrix")
    rate = device.get_sustained_flops(compute)
    stored = "fp8" if compute == "fp8_block" else compute
    if stored in device.peak_flops and compute != "fp32":
        return rate
    single_issue = device.is_capability_at_least(AMPERE) and device.cores_per_sm == 128
    return rate * (_ISSUE_SHARE if single_issue else 1.0)


def _take_bounded_log(x: FloatArray, least: float, most: float) -> FloatArray:
    return np.asarray(np.log(np.minimum(np.maximum(x, least), most)))


def _measure_alignment(x: FloatArray) -> FloatArray:
    """0, 1/3, 2/3 or 1: divisible by 1, 2, 4 or 8."""
    whole = x.astype(np.int64)
    return np.asarray(((whole & 1 == 0) * 1.0 + (whole & 3 == 0) + (whole & 7 == 0)) / 3.0)


@dataclass(frozen=True, slots=True)
class Problem:
    """GEMMs of one compute type on one device, ready for `describe`. Sizes are elements, rates per second."""

    batch: FloatArray
    m: FloatArray
    n: FloatArray
    k: FloatArray
    k_contiguous: FloatArray
    item_bytes: float
    rate: float
    device: Device

    @property
    def flop(self) -> FloatArray:
        """Arithmetic operations that the results need."""
        return np.asarray(2.0 * self.batch * self.m * self.n * self.k)

    @property
    def traffic(self) -> FloatArray:
        """Seconds that operands and results take through DRAM once."""
        read, written = self.item_bytes, max(self.item_bytes, 2.0)
        moved = self.batch * (read * (self.m * self.k + self.k * self.n) + written * self.m * self.n)
        return np.asarray(moved / (DRAM_SHARE * self.device.dram_bandwidth))

    @staticmethod
    def of(calls: Calls, device: Device, compute: str, item_bytes: float) -> Problem:
        """From calls that all compute in `compute`."""
        batch, m, n, k = np.maximum(calls.values[:, :4].T, 1.0)
        contiguous = ((calls["trans_a"] == 0) & (calls["trans_b"] == 1)).astype(np.float64)
        rate = get_engine_rate(device, compute) * (device.multiplying_gain if compute in HALF else 1.0)
        return Problem(batch, m, n, k, contiguous, item_bytes, rate, device)


def describe_gemm(engine: Engine, problem: Problem) -> tuple[FloatArray, npt.NDArray[np.float32]]:
    """Seconds from physics alone, and the features, one row each, that the residual network reads."""
    b, m, n, k, device = problem.batch, problem.m, problem.n, problem.k, problem.device
    sms = float(device.num_sms)
    traffic = problem.traffic
    ideal = problem.flop / problem.rate

    width = np.array([tile[0] for tile in engine.tiles], dtype=np.float64)[:, None]
    height = np.array([tile[1] for tile in engine.tiles], dtype=np.float64)[:, None]
    padded = np.ceil(n / width) * np.ceil(m / height)  # tiles of one GEMM
    waste = np.log(padded * (width * height) / (m * n))
    blocks = padded * b
    waves = blocks / sms
    whole = np.ceil(waves)
    intensity = width * height / (width + height)
    slices = np.minimum(np.maximum(np.floor(sms / blocks), 1.0), np.maximum(k / _SPLIT_DEPTH, 1.0))
    turns = np.where(waves < 1.0, 1.0 / slices, whole)
    tile_flop = 2.0 * width * height * (1.0 + engine.tile_overhead / intensity)
    merging = np.where(slices > 1.0, 8.0 * m * n * b * slices / device.dram_bandwidth, 0.0)
    computing = turns * tile_flop * (k * sms / problem.rate)
    by_tile = computing + merging
    arithmetic = by_tile.min(axis=0)
    slowdown = device.boost_clock_mhz / device.effective_clock_mhz
    if engine.power_limited and device.clock_mhz is None and slowdown > 1.0:
        at_boost = (computing / slowdown + merging).min(axis=0)
        seconds = engine.start_seconds + _limit_by_power(at_boost, arithmetic, traffic)
    else:
        seconds = engine.start_seconds + _overlap_arithmetic(arithmetic, traffic)

    resident = np.array(engine.resident, dtype=np.float64)[:, None]
    lead = waste[:-1] - waste[1:]
    rows = [
        waste,
        np.log(np.minimum(whole / waves, 8.0)),
        _take_bounded_log(waves, 1 / 64, 64.0),
        (waves / resident) % 1.0,
        np.tanh(np.log(by_tile / arithmetic) / 0.3),
        np.tanh(lead / 0.0005),  # libraries pick the tile that pads least, however small the difference
        np.tanh(lead / 0.02),
        _compute_size_features(engine, problem, traffic, ideal, arithmetic, seconds),
    ]
    return seconds, np.concatenate(rows, dtype=np.float32, casting="same_kind")


def _overlap_arithmetic(arithmetic: FloatArray, traffic: FloatArray) -> FloatArray:
    """Seconds of a kernel that computes while it loads."""
    longer, shorter = np.maximum(arithmetic, traffic), np.minimum(arithmetic, traffic)
    return np.asarray(longer + (1.0 - _HIDDEN) * shorter)


def _limit_by_power(at_boost: FloatArray, arithmetic: FloatArray, traffic: FloatArray) -> FloatArray:
    """Seconds on a card that cannot hold its boost clock: energies of arithmetic and traffic add up where times
    would overlap, and a short kernel is over before the clock has come down."""
    cool = _overlap_arithmetic(at_boost, traffic)
    hot = np.maximum(cool, arithmetic + _TRAFFIC_POWER * traffic)
    return np.asarray(cool + (hot - cool) * hot / (hot + _HEATING_SECONDS))


def _compute_size_features(
    engine: Engine, problem: Problem, traffic: FloatArray, ideal: FloatArray, arithmetic: FloatArray, total: FloatArray
) -> FloatArray:
    """Features of the GEMM as a whole. Sizes beyond what was measured look like the largest measured one."""
    b, m, n, k = problem.batch, problem.m, problem.n, problem.k
    contiguous = problem.k_contiguous
    if engine.linear_only:
        b, m, contiguous = np.ones_like(b), b * m, np.ones_like(b)
    most = [np.where(b > 1.0, min(_BATCHED_MOST, limit), limit) for limit in engine.most]
    mm, nn, kk = np.minimum(m, most[0]), np.minimum(n, most[1]), np.minimum(k, most[2])
    cache = problem.item_bytes / problem.device.l2_bytes
    at_once = np.minimum(b, float(problem.device.num_sms))
    return np.stack([
        _take_bounded_log(traffic / ideal, 0.005, 1e3),
        _take_bounded_log(arithmetic / ideal, 0.9, 1e4),
        _take_bounded_log(engine.start_seconds / total, 1e-3, 1.0),
        np.log(kk), np.log(np.minimum(b, 1024.0)), np.log(mm), np.log(nn), _take_bounded_log(m, 1.0, 32.0),
        _take_bounded_log(cache * nn * kk, 1e-3, 1e4),
        _take_bounded_log(cache * mm * kk, 1e-3, 1e4),
        _take_bounded_log(cache * mm * nn, 1e-3, 1e4),
        _take_bounded_log(cache * (mm * kk + nn * kk + mm * nn) * at_once, 1e-3, 1e4),
        _measure_alignment(n), _measure_alignment(k), _measure_alignment(problem.m),
        contiguous, (b > 1.0) * 1.0,
        _take_bounded_log(ideal, 1e-6, 0.1),
    ])  # fmt: skip


def gemm_seconds(calls: Calls, device: Device, start: float) -> FloatArray:
    """The longer of all products at the peak rate and the operands' trip through memory."""
    batch, m, n, k = calls["batch"], calls["m"], calls["n"], calls["k"]
    nbytes = batch * (m * k + k * n + m * n) * calls.item_bytes()
    rate = calls.per_compute({name: device.get_product_flops(name) for name in COMPUTE_TYPES}, np.inf)
    return np.asarray(start + np.maximum(2.0 * batch * m * n * k / rate, estimate_memory_seconds(nbytes, device, 1.0)))
