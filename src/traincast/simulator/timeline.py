"""What a step looks like in time: every launch and every top-level host op, and the totals people ask for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from traincast.costs.kernels.call import KernelCall
from traincast.ir.program import Program
from traincast.simulator.rank_group import RankTimes
from traincast.simulator.schedule import Code, Schedule
from traincast.utils.arrays import FloatArray, Int32Array
from traincast.utils.totals import sum_by_key


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """One step of one rank. All times are seconds from the start of the step.

    Launches, in host order: `kernel_start`, `kernel_end`, `kernel_issue` (when the launch call returned) with
    their `call`, `op` and `stream`. `origin` is when the host began the step on the simulation's clock; `seconds` is
    the time from one step to the next, `gap` that between queued kernels.
    """

    program: Program
    schedule: Schedule
    calls: tuple[KernelCall, ...]
    times: RankTimes
    origin: float
    seconds: float
    host_busy: float
    gap: float = 0.0

    @cached_property
    def launches(self) -> Int32Array:
        """Instruction index of every launch."""
        return np.flatnonzero(self.schedule.code == Code.LAUNCH).astype(np.int32)

    @cached_property
    def kernel_seconds(self) -> FloatArray:
        """Duration of every launch."""
        return self.times.kernel_end - self.times.kernel_start

    def device_active(self) -> float:
        """Seconds during which at least one stream runs a kernel."""
        return float(compute_union_seconds(self.times.kernel_start[None], self.times.kernel_end[None])[0])

    def seconds_by_family(self) -> dict[str, float]:
        """Kernel seconds by family, largest first (streams may overlap, so the sum can exceed the active time)."""
        per_call = np.bincount(
            self.schedule.call[self.launches], weights=self.kernel_seconds, minlength=len(self.calls)
        )
        families = (call.family.name for call in self.calls)
        return sum_by_key(zip(families, per_call.tolist(), strict=True))


def compute_union_seconds(start: FloatArray, end: FloatArray) -> FloatArray:
    """Length of the union of the intervals in each row."""
    if not start.shape[1]:
        return np.zeros(len(start))
    order = np.argsort(start, axis=1, kind="stable")
    start, end = np.take_along_axis(start, order, axis=1), np.take_along_axis(end, order, axis=1)
    reached = np.maximum.accumulate(end, axis=1)
    before = np.concatenate((start[:, :1], reached[:, :-1]), axis=1)
    return np.asarray(np.maximum(reached - np.maximum(start, before), 0.0).sum(axis=1))
