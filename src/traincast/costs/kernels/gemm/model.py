"""GEMMs: physics of tiles and traffic, corrected by one small network per kind of arithmetic unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import (
    COMPUTE_BYTES,
    COMPUTE_TYPES,
    WAITING_SHARE,
    Calls,
    Chips,
    Estimate,
    Family,
    KernelModel,
    State,
)
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.gemm.physics import (
    DRAM_SHARE,
    ENGINES,
    Engine,
    Problem,
    choose_engine,
    describe_gemm,
    get_engine_rate,
)
from traincast.hardware.device import AMPERE, VOLTA, Device
from traincast.hardware.sheet import ARCHITECTURES
from traincast.utils.arrays import BoolArray, FloatArray, IntArray

Float32Array = npt.NDArray[np.float32]

_VECTORS = ("mean", "scale", "least", "most", "codes")
_COLDEST = np.float32(-80.0)  # exp(80) still fits in 32 bits
_BLOCK = 512  # calls at once, in arrays used again: fresh ones cost more than the arithmetic
_FURTHEST = 3.0  # no measured kernel is further than this (in log) from its physical estimate


@dataclass(frozen=True, slots=True)
class ResidualNet:
    """Fully connected layers with SiLU between them.

    `codes` has one row per fitted device. Features are shifted by `mean`, scaled by `scale`, and held inside
    [`least`, `most`], the range seen in fitting, so that nothing is extrapolated but the physics.
    """

    mean: Float32Array
    scale: Float32Array
    least: Float32Array
    most: Float32Array
    codes: Float32Array
    weights: tuple[Float32Array, ...]
    biases: tuple[Float32Array, ...]

    def normalised(self, features: Float32Array) -> Float32Array:
        """Features (one row each) as the network reads them."""
        x = (features - self.mean[:, None]) * self.scale[:, None]
        return np.asarray(np.minimum(np.maximum(x, self.least[:, None]), self.most[:, None]))

    def correction(self, features: Float32Array, code: Float32Array) -> FloatArray:
        """Log of measured over physical time, for calls on the device with this code. Sums are in double precision:
        in single precision a call would differ by 1e-8 with the calls beside it, whose number chooses the CPU's kernel.
        """
        known, first, total = len(self.mean), self.weights[0], features.shape[1]
        shift = (code @ first[known:] + self.biases[0], *self.biases[1:])
        output = np.empty(total)
        room = np.empty((2, max(len(bias) for bias in shift), _BLOCK))
        for start in range(0, total, _BLOCK):
            h: FloatArray = self.normalised(features[:, start : start + _BLOCK]).astype(np.float64)
            width = h.shape[1]
            z = np.matmul(first[:known].T, h, out=room[0, : len(shift[0]), :width])
            z += shift[0][:, None]
            for weight, bias in zip(self.weights[1:], shift[1:], strict=True):
                h = _activate_layer(z, room[1, : len(z), :width])
                z = np.matmul(weight.T, h, out=room[0, : len(bias), :width])
                z += bias[:, None]
            output[start : start + _BLOCK] = z[0]
        return np.asarray(np.clip(output, -_FURTHEST, _FURTHEST))

    def state(self, prefix: str) -> State:
        """The network as arrays whose names start with `prefix`."""
        arrays: State = {f"{prefix}_{name}": getattr(self, name) for name in _VECTORS}
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            arrays[f"{prefix}_weight{i}"], arrays[f"{prefix}_bias{i}"] = weight, bias
        return arrays

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]], prefix: str) -> ResidualNet:
        """The network read back."""
        depth = sum(name.startswith(f"{prefix}_weight") for name in state)
        weights, biases = (tuple(state[f"{prefix}_{kind}{i}"] for i in range(depth)) for kind in ("weight", "bias"))
        return ResidualNet(**{name: state[f"{prefix}_{name}"] for name in _VECTORS}, weights=weights, biases=biases)


def compute_gate(z: Float32Array) -> Float32Array:
    """The logistic function; SiLU is z times it."""
    return np.asarray(np.float32(1) / (np.float32(1) + np.exp(-np.maximum(z, _COLDEST))))


def _activate_layer(z: FloatArray, out: FloatArray) -> FloatArray:
    """SiLU of `z`, written to `out`."""
    np.maximum(z, _COLDEST, out=out)
    np.negative(out, out=out)
    np.exp(out, out=out)
    out += 1.0
    return np.divide(z, out, out=out)


SIGMA_EDGES = np.array([1e-5, 3e-5, 1e-4, 1e-3, 1e-2])
"""Seconds at which the spread is tabulated anew."""
OLD_ARCHS = tuple(arch for arch, (vendor, since) in ARCHITECTURES.items() if vendor == "nvidia" and since < VOLTA)
"""Before Volta, the library had other kernels and the SMs issued two instructions at once."""
_UNSEEN_TRUST = 0.5  # share of the correction (in log) that carries over to a chip that was never measured
# Volta's tensor cores take rows that start at multiples of 16 bytes; cuBLAS has other half-precision GEMMs done by
# the cores, in tiles of 32 x 32 of one block of four warps each, and does not split their contraction
_SMALL_TILE = 32.0
# Share of an SM's rate that such a block reaches alone: one warp a scheduler, which waits for its own loads. Set with
# the DeepLearningExamples rows of V100 in view (the weight gradient of 13 features), see docs/evidence/dlrm.md
_LONE_BLOCK = 0.4
_VECTOR_BYTES = 16.0  # tensor cores are fed by loads of this many bytes,
# else narrower ones hold an SM to this many flop a clock, in whatever type, and hide little of its arithmetic: half the
# rate of TF32 in the A100 trace, Transformer-XL's 267,735 words on A100, A6000 and H100 (Lambda); no fitted data has it
# (tried on rows of 30,522 on H100, loaded in pairs: 43 us for 41; at twice the rate 26)
_UNALIGNED_FLOPS = 430.0
# Half precision falls back to kernels written for Turing (cutlass_75, s1688), which load element by element: bytes that
# an SM moves in a cycle, for each element that divides the rows. From one H100 trace (rows of 5,185), tried on another
_NARROW_BYTES, _HALF_BYTES = 4.0, 2.0
ACCUMULATING = ("accumulate", "looped_accumulate")
LOOPED = ("looped", "looped_accumulate")
_GRADIENT_BYTES = 8.0  # of an element that is read and written in fp32
_HIDDEN = 0.6  # share of the shorter of GEMM and gradient traffic that hides: B200, see docs/evidence/kernels.md
_VARIANT_SIGMA = 0.12  # log-sigma of these rules, from the rows of kernels/b200_efficiency that set them
_CHUNK = 4096  # calls at once: features stay in the CPU's cache
_BEYOND = 0.1  # log-sigma for every doubling outside the measured sizes
_BORROWED = 0.2  # log-sigma where a batch or a compute type borrows the correction of another
_SESSION = 0.04  # log-sigma of one card between two runs: drivers, temperature; see docs/evidence/kernels.md
_FITTED_TYPES = {
    "simt": ("fp32",), "half": ("bf16", "fp16"), "fp8": ("fp8",), "fp8_block": ("fp8_block",), "fp8_graphics": ("fp8",),
    "fp4": ("fp4",), "amd": ("fp32",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineFit:
    """What one engine learned; the corrections of `nets` are averaged. `sigma` (chip, class, duration) ends with two
    rows for chips never measured, old and newer; `box` holds the least and most of batch, m, n, k measured, for single
    and for batched GEMMs; `ceiling` (chip) is the share of the engine's rate that the fastest long linear layers
    reach. The networks were trained on the first `trained` chips; those behind have only a code of their own."""

    nets: tuple[ResidualNet, ...]
    chips: Chips
    sigma: FloatArray
    box: FloatArray
    ceiling: FloatArray
    trained: int

    def correction(self, features: Float32Array, row: int, device: Device) -> FloatArray:
        """Log of measured over physical time. A chip never measured has the mean code of its side of Volta."""
        archs = self.chips.archs[: self.trained]
        alike = [i for i, arch in enumerate(archs) if (arch in OLD_ARCHS) == device.is_capability_below(VOLTA)]
        chosen = [row] if row >= 0 else alike or slice(self.trained)
        total = sum(net.correction(features, net.codes[chosen].mean(axis=0)) for net in self.nets)
        return np.asarray(total / len(self.nets))

    def unseen_sigma(self, device: Device) -> FloatArray:
        """Spreads (class, duration) of a chip never measured: at least those of the middle measured chip."""
        spreads = self.sigma[-2 if device.is_capability_below(VOLTA) else -1]
        return np.asarray(np.maximum(spreads, np.median(self.sigma[: self.trained], axis=0)))

    def state(self, name: str) -> State:
        """Arrays whose names start with the engine's."""
        arrays: State = {f"{name}_sigma": self.sigma, f"{name}_box": self.box, f"{name}_ceiling": self.ceiling}
        arrays[f"{name}_trained"] = np.array([self.trained])
        chips = {f"{name}_{key}": value for key, value in self.chips.state().items()}
        nets = {key: value for i, net in enumerate(self.nets) for key, value in net.state(f"{name}_net{i}").items()}
        return {**arrays, **chips, **nets}

    @staticmethod
    def from_state(state: Mapping[str, npt.NDArray[Any]], name: str) -> EngineFit:
        """What `state` wrote."""
        chips = {key: state[f"{name}_{key}"] for key in ("chip_key", "chip_arch", "chip_numbers")}
        sigma, box, ceiling = (state[f"{name}_{part}"] for part in ("sigma", "box", "ceiling"))
        count = sum(key.startswith(f"{name}_net") and key.endswith("_mean") for key in state)
        nets = tuple(ResidualNet.from_state(state, f"{name}_net{i}") for i in range(count))
        trained = int(state[f"{name}_trained"][0])
        return EngineFit(nets, Chips.from_state(chips), sigma, box, ceiling, trained)


def estimate_engine_seconds(engine: Engine, fit: EngineFit, calls: Calls, device: Device, compute: str) -> FloatArray:
    """Device time of calls that all run on `engine`."""
    problem = Problem.of(calls, device, compute, float(COMPUTE_BYTES[compute]))
    physical, features = describe_gemm(engine, problem)
    row = fit.chips.find(device)
    trust = 1.0 if row >= 0 else _UNSEEN_TRUST
    factor = np.exp(trust * fit.correction(features, row, device))
    corrected = (physical - engine.least_seconds) * factor
    if device.multiplying_gain > 1.0:  # fed as fast as other chips' units, these wait for their own sums
        corrected = np.maximum(corrected, problem.flop / (WAITING_SHARE * get_engine_rate(device, compute)))
    elif compute in device.peak_flops:  # however well tiles fit, no unit multiplies faster
        corrected = np.maximum(corrected, problem.flop / device.get_product_flops(compute))
    if row >= 0:  # no linear layer runs faster than the fastest measured ones, however well its sizes divide
        fastest = problem.flop / (fit.ceiling[row] * problem.rate)
        corrected = np.where(classify_spread(calls) == 0, np.maximum(corrected, fastest), corrected)
    if engine.vector_loads:
        odd = has_unaligned_rows(calls, problem.item_bytes)
        corrected = np.where(odd, _add_narrow_loads(calls, problem, corrected), corrected)
        if device.compute_capability == VOLTA:
            corrected = np.where(odd, np.maximum(corrected, _estimate_unsplit_seconds(problem)), corrected)
    return np.asarray(engine.least_seconds + corrected)


def _estimate_unsplit_seconds(problem: Problem) -> FloatArray:
    """Seconds of a few blocks on the cores, each of which goes through the whole contraction; 0 where blocks abound."""
    blocks = problem.batch * np.ceil(problem.m / _SMALL_TILE) * np.ceil(problem.n / _SMALL_TILE)
    rate = _LONE_BLOCK * problem.device.get_sustained_flops("fp32") / problem.device.num_sms
    return np.asarray(np.where(blocks < problem.device.num_sms, 2.0 * _SMALL_TILE**2 * problem.k / rate, 0.0))


def _add_narrow_loads(calls: Calls, problem: Problem, seconds: FloatArray) -> FloatArray:
    """Seconds of GEMMs that feed their units, and since Ampere move all matrices, by loads as wide as rows allow."""
    cycles = problem.device.num_sms * 1e6 * problem.device.effective_clock_mhz
    slowed = np.hypot(seconds, problem.flop / (_UNALIGNED_FLOPS * cycles))
    if problem.item_bytes != _HALF_BYTES or not problem.device.is_capability_at_least(AMPERE):
        return np.asarray(slowed)
    widest = _VECTOR_BYTES / problem.item_bytes
    rows = [np.where(stored > 1, stored, widest) for stored in _get_stored_rows(calls)]  # vectors do not matter
    together = np.gcd.reduce([side.astype(np.int64) for side in (*rows, np.full(len(calls), widest))])
    moved = problem.batch * (problem.m * problem.k + problem.k * problem.n + problem.m * problem.n)
    return np.asarray(np.maximum(slowed, moved * problem.item_bytes / (_NARROW_BYTES * together * cycles)))


def _get_stored_rows(calls: Calls) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Elements of a row of each matrix as it is stored."""
    left = np.where(calls["trans_a"] == 1, calls["m"], calls["k"])
    return left, np.where(calls["trans_b"] == 1, calls["k"], calls["n"]), calls["n"]


def has_unaligned_rows(calls: Calls, item_bytes: float) -> BoolArray:
    """GEMMs with a matrix whose rows, as stored, do not start at multiples of 16 bytes; vectors do not matter."""
    odd = [(stored > 1) & ((item_bytes * stored) % _VECTOR_BYTES != 0) for stored in _get_stored_rows(calls)]
    return np.asarray(np.logical_or.reduce(odd))


def compute_clock_spread(device: Device) -> float:
    """Log-sigma of a clock that floats anywhere between the sustained one and boost; 0 when it is locked."""
    return 0.0 if device.clock_mhz else math.log(device.boost_clock_mhz / device.sustained_clock_mhz) / math.sqrt(12)


def classify_spread(calls: Calls) -> IntArray:
    """0: single GEMMs with both operands contiguous in k (a linear layer), 1: other single ones, 2: batched."""
    contiguous = (calls["trans_a"] == 0) & (calls["trans_b"] == 1)
    return np.where(calls["batch"] > 1.0, 2, np.where(contiguous, 0, 1))


def split_variants(calls: Calls) -> Calls:
    """The GEMMs that the calls are made of: of a loop, one turn."""
    looped = calls.is_kind(*LOOPED)
    if not looped.any():
        return calls
    values = calls.values.copy()
    values[looped, calls.family.fields.index("batch")] = 1.0
    return replace(calls, values=values)


def join_variants(calls: Calls, gemms: Estimate, device: Device) -> Estimate:
    """The estimate of the calls from that of their `split_variants` GEMMs."""
    variant = calls.kind >= calls.family.kinds.index("accumulate")
    if not variant.any():
        return gemms
    seconds = gemms.seconds * np.where(calls.is_kind(*LOOPED), np.maximum(calls["batch"], 1.0), 1.0)
    seconds = np.where(calls.is_kind(*ACCUMULATING), _add_gradient_traffic(calls, seconds, device), seconds)
    sigma = np.where(variant, np.hypot(gemms.sigma, _VARIANT_SIGMA), gemms.sigma)
    in_domain = gemms.in_domain & ~calls.is_kind("grouped")
    return replace(gemms, seconds=seconds, sigma=sigma, in_domain=in_domain)


def _add_gradient_traffic(calls: Calls, seconds: FloatArray, device: Device) -> FloatArray:
    """GEMMs whose results are added to a gradient in fp32, which is read and written."""
    elements = np.maximum(calls["batch"], 1.0) * calls["m"] * calls["n"]
    traffic = _GRADIENT_BYTES * elements / (DRAM_SHARE * device.dram_bandwidth)
    return np.asarray(np.maximum(seconds, traffic) + (1.0 - _HIDDEN) * np.minimum(seconds, traffic))


class GemmModel(KernelModel):
    """GEMM, linear and batched GEMM in every compute type. Fitted state: `engines_`, by engine name."""

    family: ClassVar[Family] = GEMM

    def __init__(self, engines: Mapping[str, EngineFit]) -> None:
        self.engines_ = dict(engines)

    def state(self) -> State:
        """All engines as named arrays."""
        return {key: value for name, fit in self.engines_.items() for key, value in fit.state(name).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with this fitted state."""
        return cls({name: EngineFit.from_state(state, name) for name in ENGINES if f"{name}_sigma" in state})

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        return join_variants(calls, self._predict_gemms(split_variants(calls), device), device)

    def _predict_gemms(self, calls: Calls, device: Device) -> Estimate:
        whole = Estimate.zeros(len(calls))
        for code in np.unique(calls.compute):
            compute = COMPUTE_TYPES[code]
            rows = np.flatnonzero(calls.compute == code)
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                whole.put(chunk, self._predict_chunk(calls.take(chunk), device, compute))
        return whole

    def _predict_chunk(self, calls: Calls, device: Device, compute: str) -> Estimate:
        engine = choose_engine(device, compute)
        fit = self.engines_[engine.name]
        row = fit.chips.find(device)
        seconds = estimate_engine_seconds(engine, fit, calls, device, compute)
        stacked = engine.linear_only & (calls["batch"] > 1.0)
        factors = _measure_factors_outside(fit.box, calls, stacked)
        beyond = np.log2(factors).sum(axis=1)
        spreads = fit.sigma[row] if row >= 0 else fit.unseen_sigma(device)
        spread = np.hypot(
            spreads[classify_spread(calls), np.searchsorted(SIGMA_EDGES, seconds)], compute_clock_spread(device)
        )
        borrowed = stacked | (compute not in _FITTED_TYPES[engine.name])
        sigma = np.hypot(np.hypot(spread, np.where(borrowed, _BORROWED, _SESSION)), _BEYOND * beyond)
        new_gpu = np.full(len(calls), row < 0)
        return Estimate(seconds, sigma, (beyond == 0.0) & ~new_gpu & ~borrowed, factors.max(axis=1), new_gpu)


def _measure_factors_outside(box: FloatArray, calls: Calls, stacked: BoolArray) -> FloatArray:
    """How many times each dimension of a call is outside the measured sizes; 1 inside."""
    sizes = np.maximum(calls.values[:, :4], 1.0)
    sizes[:, 1] *= np.where(stacked, sizes[:, 0], 1.0)
    sizes[stacked, 0] = 1.0
    batched = (sizes[:, 0] > 1.0).astype(np.int64)
    return np.asarray(np.maximum(np.maximum(sizes / box[batched, 1], box[batched, 0] / sizes), 1.0))
