"""From kernel calls to seconds: a fitted model where there is one, the roofline elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache

import numpy as np

from traincast.costs.in_step import SHIPPED, InStep
from traincast.costs.kernels.call import Calls, Estimate
from traincast.costs.kernels.collective import COLLECTIVE
from traincast.costs.kernels.families import Roofline, load_shipped_model
from traincast.costs.kernels.given import GIVEN
from traincast.costs.kernels.in_step import convert_seconds_in_step
from traincast.costs.kernels.lowered import LoweredProgram
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast.utils.errors import TraincastError

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
