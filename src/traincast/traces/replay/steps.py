"""What a simulation over a timeline's instructions makes of its steps, against what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.simulator.many_ranks import simulate_rank
from traincast.simulator.rank_group import Clocks, RankTimes
from traincast.simulator.schedule import Code
from traincast.traces.intervals import Intervals
from traincast.traces.link import Linked
from traincast.traces.replay.timeline import STEP_EDGE, TimelineInstructions
from traincast.utils.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step measured and simulated, in seconds."""

    number: int
    measured: float
    walked: float

    @property
    def error(self) -> float:
        """Signed relative error of the simulation."""
        return self.walked / self.measured - 1.0 if self.measured else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Replay:
    """What the simulation made of a timeline: its steps, and when each kernel (event `kernel_row`) ran.

    Kernel times are seconds from `origin`, a moment in nanoseconds on the trace's clock.
    """

    steps: tuple[ReplayedStep, ...]
    origin: int
    kernel_row: IntArray
    kernel_start: FloatArray
    kernel_end: FloatArray

    @property
    def walked(self) -> FloatArray:
        """Seconds of every step as simulated."""
        return np.array([step.walked for step in self.steps])


def simulate_replay(linked: Linked, instructions: TimelineInstructions) -> Replay:
    """Simulates instructions whose times may have been replaced, and compares each step with the measured one."""
    schedule = instructions.schedule
    clocks = Clocks.at_zero(schedule, instructions.gap)
    times = simulate_rank(
        schedule, instructions.host_seconds, instructions.device_seconds, clocks, gap=instructions.gap
    )
    return compare_with_measured(linked, instructions, times)


def compare_with_measured(
    linked: Linked, instructions: TimelineInstructions, times: RankTimes, begin: float = 0.0
) -> Replay:
    """What a simulation that began at `begin` made of the timeline, each step against the measured one."""
    launches = instructions.schedule.code == Code.LAUNCH
    return Replay(
        steps=_compare_steps(linked, instructions, times, begin),
        origin=instructions.origin,
        kernel_row=instructions.row[launches],
        kernel_start=times.kernel_start + instructions.kept_seconds[launches] - begin,
        kernel_end=times.kernel_end - begin,
    )


def step_edges(instructions: TimelineInstructions, times: RankTimes) -> FloatArray:
    """When the simulation came to each step's start and to the last one's end, in seconds."""
    edges: FloatArray = times.host_after[instructions.row == STEP_EDGE]
    return edges


def _compare_steps(
    linked: Linked, instructions: TimelineInstructions, times: RankTimes, begin: float
) -> tuple[ReplayedStep, ...]:
    """Simulated step = host time between its markers; without markers, until host and device are done."""
    if not linked.marked:
        simulated = max(float(times.host_after.max()), float(times.kernel_end.max(initial=0.0))) - begin
        return (ReplayedStep(0, linked.steps[0].seconds, simulated),)
    lengths = np.diff(step_edges(instructions, times)).tolist()
    return tuple(
        ReplayedStep(step.number, step.seconds, simulated)
        for step, simulated in zip(linked.steps, lengths, strict=True)
    )


def compute_device_work(linked: Linked, instructions: TimelineInstructions) -> FloatArray:
    """Seconds that every step gives to its busiest stream, gaps between kernels included."""
    launches = (instructions.schedule.code == Code.LAUNCH) & (instructions.point >= 0)
    step, stream = linked.step[instructions.row[launches]], instructions.schedule.target[launches]
    work = np.zeros((len(linked.steps), instructions.schedule.num_streams))
    inside = step >= 0
    seconds = instructions.device_seconds[launches] + instructions.gap
    np.add.at(work, (step[inside], stream[inside]), seconds[inside])
    most: FloatArray = work.max(axis=1)
    return most


def compute_exposed_communication(linked: Linked, instructions: TimelineInstructions, times: RankTimes) -> list[float]:
    """Seconds of every simulated step in which a collective ran and nothing else did."""
    launches = instructions.schedule.code == Code.LAUNCH
    exchanging = linked.find_communication(instructions.row[launches])
    began = times.kernel_start + instructions.kept_seconds[launches]
    start, end = (np.rint(1e9 * moment).astype(np.int64) for moment in (began, times.kernel_end))
    compute = Intervals.from_spans(start[~exchanging], end[~exchanging])
    collectives = Intervals.from_spans(start[exchanging], end[exchanging])
    if linked.marked:
        edges = np.rint(1e9 * step_edges(instructions, times)).astype(np.int64).tolist()
    else:
        edges = [int(min(start.min(initial=0), 0)), int(end.max(initial=0))]
    return [
        1e-9 * collectives.clip_to(low, high).subtract_length(compute.clip_to(low, high))
        for low, high in zip(edges, edges[1:], strict=False)
    ]
