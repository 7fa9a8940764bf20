"""What a step looks like in time: every launch and every top-level host op, and the totals people ask for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.kernels.call import FloatArray, KernelCall
from traincast.simulate.schedule import Code, Schedule
from traincast.simulate.walk import Clocks, Trace, walk
from traincast.workload.program import Int32Array, Program


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """One step of one rank. All times are seconds from the start of the step.

    Launches, in host order: `kernel_start`, `kernel_end`, `kernel_issue` (when the launch call returned) with
    their `call`, `op` and `stream`. `origin` is when the host began the step on the walk's clock; `seconds` is the
    time from one step to the next, `gap` that between queued kernels.
    """

    program: Program
    schedule: Schedule
    calls: tuple[KernelCall, ...]
    trace: Trace
    origin: float
    seconds: float
    host_busy: float
    gap: float = 0.0

    @property
    def launches(self) -> Int32Array:
        """Instruction index of every launch."""
        return np.flatnonzero(self.schedule.code == Code.LAUNCH).astype(np.int32)

    @property
    def kernel_seconds(self) -> FloatArray:
        """Duration of every launch."""
        return self.trace.kernel_end - self.trace.kernel_start

    def device_active(self) -> float:
        """Seconds during which at least one stream runs a kernel."""
        if not len(self.trace.kernel_start):
            return 0.0
        order = np.argsort(self.trace.kernel_start, kind="stable")
        start, end = self.trace.kernel_start[order], self.trace.kernel_end[order]
        reached = np.maximum.accumulate(end)
        before = np.concatenate(([start[0]], reached[:-1]))
        return float(np.maximum(reached - np.maximum(start, before), 0.0).sum())

    def seconds_by_family(self) -> dict[str, float]:
        """Kernel seconds by family, largest first (streams may overlap, so the sum can exceed the active time)."""
        totals: dict[str, float] = {}
        per_call = np.bincount(
            self.schedule.call[self.launches], weights=self.kernel_seconds, minlength=len(self.calls)
        )
        for call, seconds in zip(self.calls, per_call.tolist(), strict=True):
            totals[call.family.name] = totals.get(call.family.name, 0.0) + seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def simulate_step(
    program: Program,
    schedule: Schedule,
    calls: tuple[KernelCall, ...],
    host_seconds: FloatArray,
    call_seconds: FloatArray,
    *,
    synchronised: bool,
    gap: float = 0.0,
) -> Timeline:
    """Walks the step once from idle, or twice when steps run into each other, and keeps the last.

    The second of two walks starts where the first left its clocks, so that its length is that of a step in the
    middle of a long run: host-bound, device-bound or held up by its own synchronisations.
    """
    launches = schedule.code == Code.LAUNCH
    kernel_seconds = np.zeros(len(schedule.code))
    kernel_seconds[launches] = call_seconds[schedule.call[launches]]
    clocks = Clocks.at_zero(schedule, gap)
    origin = previous = 0.0
    if not synchronised:
        walk(schedule, host_seconds, kernel_seconds, clocks, gap=gap)
        previous = clocks.latest
        origin = max(clocks.threads)
        clocks.threads = [origin] * len(clocks.threads)
    trace = walk(schedule, host_seconds, kernel_seconds, clocks, gap=gap)
    return Timeline(
        program=program,
        schedule=schedule,
        calls=calls,
        trace=trace,
        origin=origin,
        seconds=clocks.latest - previous,
        host_busy=float(host_seconds.sum()),
        gap=gap,
    )
