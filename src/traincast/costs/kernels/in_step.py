"""GEMMs, convolutions and attention inside a step: at the clock that board power sustains, in a framework's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traincast.costs.in_step import HALF, NARROW, InStep, load_shipped_tables
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.call import Calls, KernelCall
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.costs.kernels.work import count_flops
from traincast.hardware.device import AMPERE, HOPPER, POWER_EXPONENT, Device
from traincast.ir.variants import BATCHED, FLASH2, GROUPED, GROUPED_NARROW, NARROW_LOADS, RING, ROWWISE, TRITON, TUNED
from traincast.utils.arrays import FloatArray

_BITS = {"fp16": HALF, "bf16": HALF, "fp8": NARROW, "fp8_block": NARROW, "fp4": NARROW}
_POWER_BOUND = 0.5  # of the peak rate: a GEMM that reaches it draws the board's full power; below, in proportion
_POWER_SECONDS = 150e-6  # the board's regulator averages over this long: shorter GEMMs, between others, run at boost
_A100_FLOPS_PER_SM_CLOCK = 2048.0  # of 16-bit matrix instructions: 1,024 fused multiply-adds
_WATTS_PER_TFLOPS: dict[str, float] = load_shipped_tables()["watts_per_tflops"]
_BACKWARD_FLOPS = 1.25  # five GEMMs where MFU counts four: scores are computed again


def convert_seconds_in_step(
    calls: Calls, members: Sequence[KernelCall], seconds: FloatArray, device: Device, numbers: InStep
) -> FloatArray:
    """Seconds of these calls (`members`, of one family) in a step, from those they take alone."""
    if calls.family is GEMM:
        return seconds * _compute_gemm_factors(calls, members, seconds, device, numbers)
    if calls.family is CONV and device.is_capability_at_least(AMPERE):  # Turing's were measured on T4 at its limit
        return seconds * _compute_power_factors(calls, seconds, device, numbers)
    if calls.family is ATTENTION:
        return _convert_attention_seconds(calls, members, seconds, device, numbers)
    if calls.family is ELEMENTWISE and any(call.variant for call in members):
        slow = np.array([NARROW_LOADS in call.variant.split() for call in members])
        return np.where(slow, numbers.narrow_loads * seconds, seconds)
    return seconds


def _compute_gemm_factors(
    calls: Calls, members: Sequence[KernelCall], seconds: FloatArray, device: Device, numbers: InStep
) -> FloatArray:
    sustained = _compute_power_factors(calls, seconds, device, numbers)
    amd = device.vendor == "amd"
    rows = zip(members, sustained.tolist(), strict=True)
    return np.array([_compute_gemm_factor(call, power, numbers, amd=amd) for call, power in rows])


def _compute_gemm_factor(call: KernelCall, power: float, numbers: InStep, *, amd: bool) -> float:
    if call.compute not in _BITS:
        return 1.0
    words = call.variant.split()
    if BATCHED in words:
        return numbers.batched
    if GROUPED in words or GROUPED_NARROW in words:
        return numbers.grouped if GROUPED in words else numbers.grouped_narrow
    factor = power * (numbers.rowwise if ROWWISE in words and _BITS[call.compute] == NARROW else 1.0)
    return factor * (numbers.untuned if amd and TUNED not in words else 1.0)


def _compute_power_factors(calls: Calls, seconds: FloatArray, device: Device, numbers: InStep) -> FloatArray:
    """How much longer calls take at the sustained clock: the more, the closer they come to the peak rate. Kernels that
    wait for memory leave power to spare, and so do kernels that end before power is regulated (of a DLRM, not of an
    LLM) and a clock that is locked below."""
    by_type = {name: _get_sustained_factor(device, bits, numbers) for name, bits in _BITS.items()}
    full = calls.per_compute(by_type, 1.0)
    if device.clock_mhz:
        full = np.where(full > 1.0, np.maximum(1.0, full * device.clock_mhz / device.boost_clock_mhz), full)
    peak = calls.per_compute({name: device.get_peak_flops(name) for name in _BITS}, 1.0)
    reached = count_flops(calls) / np.maximum(peak * seconds, 1e-30)
    regulated = np.minimum(1.0, seconds / _POWER_SECONDS) ** 2
    return np.asarray(1.0 + (full - 1.0) * np.minimum(1.0, reached / _POWER_BOUND) * regulated)


def _get_sustained_factor(device: Device, bits: str, numbers: InStep) -> float:
    """How much longer GEMMs (of 16 or 8 `bits`) or "attention" take at the clock that the board's power sustains.
    `sustained` is that of the board which was measured; others of its architecture have more or less power for their
    units. Units that wait for their own sums draw less since Ampere; Turing's take as much longer as its others.
    Benchmarks of 8 bits hold casts, so that a step may be faster than they are."""
    arch = device.arch.rstrip("0123456789") if device.vendor == "amd" else device.arch  # one set for all CDNA
    measured = numbers.sustained.get(f"{arch} {bits}", 1.0)
    if device.multiplying_gain > 1.0:
        return 1.0 if device.is_capability_at_least(AMPERE) else measured
    if bits != NARROW and (measured <= 1.0 or device.vendor == "amd"):
        return measured
    if device.power_limit_watts is None or device.arch not in _WATTS_PER_TFLOPS:
        return measured
    watts: float = 1e12 * device.power_limit_watts / device.peak_flops.get("fp16", device.peak_flops["fp32"])
    held = device.sustained_clock_mhz / device.boost_clock_mhz  # what kernels alone already take
    short: float = (_WATTS_PER_TFLOPS[device.arch] / watts) ** POWER_EXPONENT
    return measured * held * short if bits == NARROW else max(1.0, measured * held * short)


def _convert_attention_seconds(
    calls: Calls, members: Sequence[KernelCall], seconds: FloatArray, device: Device, numbers: InStep
) -> FloatArray:
    factor = calls.per_compute(dict.fromkeys(_BITS, _get_sustained_factor(device, "attention", numbers)), 1.0)
    rate = device.num_sms * device.boost_clock_mhz * 1e6 * _A100_FLOPS_PER_SM_CLOCK
    backward = np.array([call.kind.endswith("backward") for call in members])
    flops = count_flops(calls) * np.where(backward, _BACKWARD_FLOPS, 1.0)
    # of Ampere and Ada the second flash attention is what was measured
    own = device.is_capability_at_least(AMPERE) and device.is_capability_below(HOPPER)
    shares = {TRITON: numbers.triton, FLASH2: np.inf if own else numbers.flash2}
    share = np.array([next((shares[w] for w in call.variant.split() if w in shares), np.inf) for call in members])
    ring = np.array([numbers.ring if RING in call.variant.split() else 1.0 for call in members])
    return np.asarray(np.maximum(seconds * factor, flops / (share * rate)) * ring)
