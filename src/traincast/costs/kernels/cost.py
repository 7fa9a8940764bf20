"""From kernel calls to seconds: a fitted model where there is one, the roofline elsewhere; alone or inside a step.

GEMMs, convolutions and attention count the operations of model FLOPs utilisation; streaming kernels count one operation
an element, since what they do with it hardly matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache

import numpy as np

from traincast.costs.in_step import HALF, NARROW, SHIPPED, InStep, load_shipped_tables
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.contract import Calls, Estimate, KernelCall
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.physics import Geometry
from traincast.costs.kernels.families import Roofline, load_shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.given import GIVEN
from traincast.costs.kernels.lower import LoweredProgram
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.hardware.device import AMPERE, HOPPER, POWER_EXPONENT, Device
from traincast.ir.ops import BATCHED, FLASH2, GROUPED, GROUPED_NARROW, NARROW_LOADS, RING, ROWWISE, TRITON, TUNED
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.errors import TraincastError

COUNTED_FLOPS = "counted_flops"
"""The field of calls whose operations were counted when they were lowered."""
# a product of scores and one with values, two operations each; backwards twice as many, the scores that fused kernels
# compute again are not counted (Chowdhery et al., PaLM, appendix B)
_ATTENTION_FLOPS = {"forward": 4.0, "backward": 8.0}
Work = tuple[FloatArray, FloatArray]
"""Operations and bytes of every call."""


def count_flops(calls: Calls) -> FloatArray:
    """Operations of every call (a multiplication and its addition are two); 0 for families that only move data. Calls
    of a measured CPU carry theirs."""
    if COUNTED_FLOPS in calls.family.fields:
        return calls[COUNTED_FLOPS]
    count = _COUNTED.get(calls.family.name)
    return np.zeros(len(calls)) if count is None else np.asarray(count(calls))


def _count_gemm_flops(calls: Calls) -> FloatArray:
    return np.asarray(2.0 * np.maximum(calls["batch"], 1.0) * calls["m"] * calls["n"] * calls["k"])


def _count_conv_flops(calls: Calls) -> FloatArray:
    """The same number forwards and for either gradient: every pair of an output and an input of its window meets."""
    return Geometry.of(calls).flops


def _count_attention_flops(calls: Calls) -> FloatArray:
    """A causal mask skips half of the pairs."""
    per_pair = np.array([_ATTENTION_FLOPS[kind.rpartition("_")[2]] for kind in calls.family.kinds])[calls.kind]
    pairs = calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"] * (1.0 - 0.5 * calls["causal"])
    return np.asarray(per_pair * pairs * calls["head_dim"])


_COUNTED: dict[str, Callable[[Calls], FloatArray]] = {
    GEMM.name: _count_gemm_flops,
    CONV.name: _count_conv_flops,
    ATTENTION.name: _count_attention_flops,
}


def count_work(calls: Calls) -> Work | None:
    """Operations and bytes of calls of one family; None where there is no arithmetic (transfers, collectives)."""
    function = _WORK.get(calls.family.name)
    return None if function is None else function(calls)


def _count_gemm_work(calls: Calls) -> Work:
    batch, m, n, k = (calls[name] for name in ("batch", "m", "n", "k"))
    return count_flops(calls), batch * (m * k + k * n + m * n) * calls.item_bytes()


def _count_conv_work(calls: Calls) -> Work:
    return count_flops(calls), Geometry.of(calls).total_size * calls.item_bytes()


def _count_attention_work(calls: Calls) -> Work:
    rows = calls["batch"] * (calls["q_heads"] * calls["q_len"] + calls["kv_heads"] * calls["kv_len"])
    passes = np.where(calls.is_kind("backward", "efficient_backward"), 4.0, 2.0)
    return count_flops(calls), passes * rows * calls["head_dim"] * calls.item_bytes()


def _count_streaming_work(calls: Calls) -> Work:
    return calls["elements"], calls["bytes_read"] + calls["bytes_written"]


def _count_rowwise_work(calls: Calls) -> Work:
    elements = calls["rows"] * calls["cols"]
    return elements, 2.0 * elements * calls.item_bytes()


def _count_embedding_work(calls: Calls) -> Work:
    """A sum of every element looked up; rows as they are asked for, once more where they are written back."""
    written = np.where(np.array(["backward" in kind for kind in calls.family.kinds])[calls.kind], 2.0, 1.0)
    pooled = calls["batch"] * calls["columns"] * calls["row_item_bytes"]
    return calls["row_bytes"] / np.maximum(calls["row_item_bytes"], 1.0), written * calls["row_bytes"] + pooled


_WORK: dict[str, Callable[[Calls], Work]] = {
    "gemm": _count_gemm_work,
    "conv": _count_conv_work,
    "attention": _count_attention_work,
    "embedding": _count_embedding_work,
    "softmax": _count_rowwise_work,
    "norm": _count_rowwise_work,
    "elementwise": _count_streaming_work,
    "reduction": _count_streaming_work,
    "pool": _count_streaming_work,
    "index": _count_streaming_work,
}


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
    power = _compute_power_factors(calls, seconds, device, numbers)
    # a kernel that nobody tuned wastes cycles of matrix units: little where it waits for memory or for its launch
    wasted = numbers.untuned - 1.0 if device.vendor == "amd" else 0.0
    picked = 1.0 + wasted * _compute_bound_shares(calls, seconds, device)
    rows = zip(members, power.tolist(), picked.tolist(), strict=True)
    return np.array([_compute_gemm_factor(call, held, untuned, numbers) for call, held, untuned in rows])


def _compute_gemm_factor(call: KernelCall, power: float, untuned: float, numbers: InStep) -> float:
    if call.compute not in _BITS:
        return power
    words = call.variant.split()
    if BATCHED in words:
        return numbers.batched
    if GROUPED in words or GROUPED_NARROW in words:
        return numbers.grouped if GROUPED in words else numbers.grouped_narrow
    factor = power * (numbers.rowwise if ROWWISE in words and _BITS[call.compute] == NARROW else 1.0)
    return factor if TUNED in words else factor * untuned


def _compute_bound_shares(calls: Calls, seconds: FloatArray, device: Device) -> FloatArray:
    """How close calls come to the rate at which arithmetic is all that they wait for, from 0 to 1."""
    peak = calls.per_compute({name: device.get_peak_flops(name) for name in (*_BITS, "tf32")}, 1.0)
    reached = count_flops(calls) / np.maximum(peak * seconds, 1e-30)
    return np.asarray(np.minimum(1.0, reached / _POWER_BOUND))


def _compute_power_factors(calls: Calls, seconds: FloatArray, device: Device, numbers: InStep) -> FloatArray:
    """How much longer calls take at the sustained clock: the more, the closer they come to the peak rate. Kernels that
    wait for memory leave power to spare, and so do kernels that end before power is regulated (of a DLRM, not of an
    LLM) and a clock that is locked below. TF32 has half the rate for no fewer watts on Hopper (VGG-13 in H100's trace,
    Lambda's steps), A100 keeps its clock in it."""
    bits_of = _BITS | ({"tf32": HALF} if device.is_capability_at_least(HOPPER) else {})
    by_type = {name: _get_sustained_factor(device, bits, numbers) for name, bits in bits_of.items()}
    full = calls.per_compute(by_type, 1.0)
    if device.clock_mhz:
        full = np.where(full > 1.0, np.maximum(1.0, full * device.clock_mhz / device.boost_clock_mhz), full)
    regulated = np.minimum(1.0, seconds / _POWER_SECONDS) ** 2
    return np.asarray(1.0 + (full - 1.0) * _compute_bound_shares(calls, seconds, device) * regulated)


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


_LONGEST = 1e6  # seconds of one kernel: eleven days
OUTSIDE_SIGMA = 0.1
"""Log-sigma that leaving what a model was fitted on adds to its own (squares add up): see docs/evidence/kernels.md."""


class Source(IntEnum):
    """Where a duration came from."""

    MEASURED = 0
    MODEL = 1
    ROOFLINE = 2
    ESTIMATED = 3


@dataclass(frozen=True, eq=False, slots=True)
class Costs:
    """Durations of the distinct calls of a program, in seconds, with spread, domain mask and source; `factor` and
    `new_gpu` say how far outside of their domain calls are, see `Estimate`."""

    seconds: FloatArray
    sigma: FloatArray
    in_domain: BoolArray
    source: IntArray
    factor: FloatArray
    new_gpu: BoolArray

    def spread(self) -> FloatArray:
        """Log-sigma of every call: that of its model, wider outside of what it was fitted on."""
        return np.hypot(self.sigma, np.where(self.in_domain, 0.0, OUTSIDE_SIGMA))


@cache
def _roofline() -> Roofline:
    return Roofline()


def price_calls(calls: Calls, device: Device, *, roofline_only: bool = False) -> tuple[Estimate, Source]:
    """Device time of calls of one family on this device."""
    model = None if roofline_only else load_shipped_model(calls.family.name)
    source = Source.ROOFLINE if model is None else Source.MODEL
    predictor = _roofline() if model is None else model
    estimate = predictor.predict(calls, device)
    allowed = np.flatnonzero(calls.is_compute("tf32"))
    if not len(allowed):
        return estimate, source
    return _take_faster(estimate, allowed, predictor.predict(calls.take(allowed).computing_in("fp32"), device)), source


def _take_faster(estimate: Estimate, rows: IntArray, other: Estimate) -> Estimate:
    """The estimate with those of `rows` replaced that `other`, which is of these rows alone, does in less time.

    Where TF32 is allowed, libraries still have their fp32 kernels to choose from.
    """
    chosen = np.flatnonzero(other.seconds < estimate.seconds[rows])
    whole = estimate.take(np.arange(len(estimate.seconds)))
    whole.put(rows[chosen], other.take(chosen))
    return whole


def price_in_step(
    lowered: LoweredProgram, device: Device, *, roofline_only: bool = False, in_step: InStep = SHIPPED
) -> Costs:
    """Device time of every distinct call of a program on this device, as part of a step: `in_step` is what steps add
    to kernels that run alone (a roofline stays one). `price_calls` gives the time of kernels alone.

    Collectives are left at zero: their time is that of all ranks of the group together.
    """
    costs = price_alone(lowered, device, roofline_only=roofline_only)
    return costs if roofline_only else convert_to_in_step(costs, lowered, device, in_step)


def convert_to_in_step(costs: Costs, lowered: LoweredProgram, device: Device, in_step: InStep) -> Costs:
    """The costs of a program's calls in a step, from those that they have alone."""
    seconds = costs.seconds.copy()
    for rows, calls in lowered.by_family():
        members = [lowered.calls[row] for row in rows.tolist()]
        seconds[rows] = convert_seconds_in_step(calls, members, seconds[rows], device, in_step)
    return replace(costs, seconds=seconds)


def price_alone(lowered: LoweredProgram, device: Device, *, roofline_only: bool = False) -> Costs:
    """Device time of every distinct call of a program, each measured by itself."""
    whole, source = Estimate.zeros(len(lowered.calls)), np.zeros(len(lowered.calls), dtype=np.int64)
    seconds, _, in_domain, factor, new_gpu = whole.columns()
    for rows, calls in lowered.by_family():
        if calls.family is COLLECTIVE:
            in_domain[rows], source[rows] = True, Source.MODEL
            continue
        with np.errstate(all="ignore"):  # what is not finite is rejected by name below
            estimate, origin = price_calls(calls, device, roofline_only=roofline_only)
        _check_sensible(calls, estimate, device)
        whole.put(rows, estimate)
        seconds[rows] *= device.corrections.get(calls.family.name, 1.0)
        in_domain[rows] |= calls.family is GIVEN
        source[rows] = origin
    source[lowered.estimated] = Source.ESTIMATED
    return Costs(seconds, whole.sigma, in_domain, source, factor, new_gpu)


def _check_sensible(calls: Calls, estimate: Estimate, device: Device) -> None:
    """Rejects a duration that is negative or not finite, and one longer than any step."""
    wrong = ~((estimate.seconds >= 0) & (estimate.seconds <= _LONGEST) & np.isfinite(estimate.sigma))
    if wrong.any():
        first = int(np.argmax(wrong))
        sizes = dict(zip(calls.family.fields, calls.values[first].tolist(), strict=True))
        shown_sizes = ", ".join(f"{name} {size:g}" for name, size in sizes.items())
        raise TraincastError(
            f"a {calls.family.name} kernel has no sensible duration on {device.name} ({estimate.seconds[first]:g} s "
            f"with {shown_sizes}); the workload's sizes or the platform's figures are wrong"
        )
