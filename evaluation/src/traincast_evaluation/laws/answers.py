"""What every answer is, whatever was asked: its parts add up, its interval holds it, no kernel beats its roof."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from traincast.costs.kernels.attention.physics import get_attention_peak
from traincast.costs.kernels.conv.physics import WINOGRAD_SAVES, Geometry
from traincast.costs.kernels.cost import count_flops
from traincast.hardware.device import Device
from traincast.simulator.prediction.result import Prediction

ROUNDING = 1e-6  # relative: sums in another order
ROOFS = ("no more than the peak", "no kernel beats its roof")
"""Laws of what a GPU can do."""
COUNTED = ("gemm", "conv", "attention")
"""Families of products, whose arithmetic is counted."""
_LEAST_SECONDS = 20e-6  # kernels that are short are of launches and waves, and far below their roof


def check_answer(result: Prediction) -> Iterator[tuple[str, str, float]]:
    """Laws that a prediction breaks, each with what it shows and by which factor (infinite: no matter of degree)."""
    low, high = result.interval
    step = result.iteration
    if not 0 < low <= step <= high < math.inf:
        yield "the interval contains the value", f"{low:g} to {high:g} around {step:g} s", math.inf
    if not math.isclose(result.device_active + result.device_idle, step, rel_tol=ROUNDING):
        yield "active + idle = step", f"{result.device_active:g} + {result.device_idle:g} is not {step:g} s", math.inf
    families = sum(result.by_family.values())
    for name, parts in (("phases", result.by_phase), ("sources", result.by_source)):
        if not math.isclose(sum(parts.values()), families, rel_tol=ROUNDING, abs_tol=1e-12):
            yield f"families and {name} sum to the same", f"{families:g} and {sum(parts.values()):g} s", math.inf
    if result.device_active > families * (1 + ROUNDING):
        yield (
            "kernels cover the active time",
            f"active {result.device_active:g} s of {families:g} s of kernels",
            math.inf,
        )
    if min((*result.by_family.values(), result.device_idle, result.host, result.exposed_comm), default=0.0) < -1e-12:
        yield "no time is negative", "a part of the step is negative", math.inf
    for rank in result.ranks:
        if rank.iteration > step * (1 + ROUNDING):
            yield (
                "no rank takes longer than the step",
                f"rank {rank.ranks[0]}: {rank.iteration:g} of {step:g} s",
                math.inf,
            )
            break
    mfu = result.throughput.mfu
    plain = ("fp32", "tf32")  # where TF32 is allowed, cuDNN still has its fp32 kernels
    winograd = any(call.family.name == "conv" and call.compute in plain for call in result.timeline.calls)
    if mfu is not None and not 0 <= mfu <= (WINOGRAD_SAVES if winograd else 1.0):
        yield "no more than the peak", f"MFU {mfu:.1%}", mfu
    if not 0 < result.memory.peak_bytes <= result.needed_bytes:
        yield "memory is positive", f"peak {result.memory.peak_bytes:g} of {result.needed_bytes:g} bytes", math.inf
    yield from _check_roofs(result)


def _check_roofs(result: Prediction) -> Iterator[tuple[str, str, float]]:
    """Kernels that take less time than their arithmetic allows."""
    timeline, device = result.timeline, result.platform.device
    shortest = np.full(len(timeline.calls), np.inf)
    np.minimum.at(shortest, timeline.schedule.call[timeline.launches], timeline.kernel_seconds)
    for instructions in result.simulation.instructions.lowered:
        if instructions.calls is not timeline.calls:
            continue
        for rows, calls in instructions.by_family():
            if calls.family.name not in COUNTED:
                continue
            saved = np.ones(len(calls))
            if calls.family.name == "conv":  # where TF32 is allowed, cuDNN still has its fp32 kernels
                saved = Geometry.of(calls.computing_in("fp32"), device).saved_products
            find_peak = get_attention_peak if calls.family.name == "attention" else Device.get_product_flops
            for row, work, times in zip(rows.tolist(), count_flops(calls).tolist(), saved.tolist(), strict=True):
                compute = timeline.calls[row].compute.partition("_")[0]
                if compute not in device.peak_flops or not _LEAST_SECONDS < shortest[row] < math.inf:
                    continue
                roof = find_peak(device, compute) * (device.multiplying_gain if compute == "fp16" else 1.0)
                rate = work / shortest[row] / max(roof, times * device.get_product_flops("fp32"))
                if rate > 1 + ROUNDING:
                    shown = f"{calls.family.name} in {compute} at {rate:.2f} of its roof"
                    yield "no kernel beats its roof", shown, rate
                    return
        return
