"""What a simulation over a timeline's instructions makes of its steps, against what was measured, and of steps that go
on for ever: what one takes when host and device have settled into their pace.

The distance between two markers is the host's. A device that falls behind shows in it only once the queue of launches
is full, which may be many steps later. So the traced steps are simulated several times in a row, and a step is what
every further one adds to the moment when host and device are both done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np

from traincast.simulator.many_ranks import (
    Clocks,
    Collectives,
    GroupSimulation,
    RankGroup,
    RankTimes,
    simulate_rank,
    simulate_ranks,
)
from traincast.simulator.schedule import Code, Schedule
from traincast.simulator.timeline import Segment, find_critical_path
from traincast.traces.breakdown import Intervals, find_device_steps
from traincast.traces.link import Linked
from traincast.traces.replay.timeline import STEP_EDGE, TimelineInstructions
from traincast.utils.arrays import FloatArray, IndexArray, IntArray


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step measured and simulated, in seconds."""

    number: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Signed relative error of the simulation."""
        return self.simulated / self.measured - 1.0 if self.measured else 0.0


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
    def simulated(self) -> FloatArray:
        """Seconds of every step as simulated."""
        return np.array([step.simulated for step in self.steps])


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
    row, end = instructions.row[launches], times.kernel_end - begin
    start = times.kernel_start + instructions.kept_seconds[launches] - begin
    steps = find_device_steps(linked)
    lengths = (
        _measure_on_device(linked, row, start, end) if steps else _measure_on_host(linked, instructions, times, begin)
    )
    return Replay(
        steps=tuple(
            ReplayedStep(step.number, step.seconds, simulated)
            for step, simulated in zip(steps or linked.steps, lengths.tolist(), strict=True)
        ),
        origin=instructions.origin,
        kernel_row=row,
        kernel_start=start,
        kernel_end=end,
    )


def step_edges(instructions: TimelineInstructions, times: RankTimes) -> FloatArray:
    """When the simulation came to each step's start and to the last one's end, in seconds."""
    edges: FloatArray = times.host_after[instructions.row == STEP_EDGE]
    return edges


def _measure_on_host(linked: Linked, instructions: TimelineInstructions, times: RankTimes, begin: float) -> FloatArray:
    """Seconds of simulated steps between their markers on the host; without markers, until host and device are done."""
    if linked.marked:
        return np.diff(step_edges(instructions, times))
    return np.array([max(float(times.host_after.max()), float(times.kernel_end.max(initial=0.0))) - begin])


def _measure_on_device(linked: Linked, row: IntArray, start: FloatArray, end: FloatArray) -> FloatArray:
    """Likewise from the first kernel of one to the first of the next, where the host runs ahead."""
    step = linked.step[row]
    inside = step >= 0
    starts = np.full(len(linked.steps), np.inf)
    np.minimum.at(starts, step[inside], start[inside])
    return np.maximum(np.diff(starts, append=end[inside].max()), 0.0)


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


_ROUNDS, _SETTLED = 4, 2  # rounds of the traced steps that are simulated, and those after which they count
_SAME_PACE = 1e-3  # relative: rounds of a host that a device holds differ by next to nothing
_MOST_VALUES = 1 << 22  # instructions times variants simulated side by side, each of which takes some 50 bytes


def select_marked_steps(linked: Linked, instructions: TimelineInstructions) -> TimelineInstructions:
    """The instructions of the marked steps alone; all of them where no step was marked."""
    if not linked.marked:
        return instructions
    edges = np.flatnonzero(instructions.row == STEP_EDGE)
    return _select_instructions(instructions, np.arange(edges[0] + 1, edges[-1] + 1))


def _select_instructions(instructions: TimelineInstructions, chosen: IndexArray) -> TimelineInstructions:
    schedule = replace(instructions.schedule, **_select_columns(instructions.schedule, chosen))
    return replace(instructions, schedule=schedule, **_select_columns(instructions, chosen))


def _select_columns(table: Schedule | TimelineInstructions, chosen: IndexArray) -> dict[str, Any]:
    """These rows of all columns of a table."""
    columns = {f.name: getattr(table, f.name) for f in fields(table)}
    return {name: column[chosen] for name, column in columns.items() if isinstance(column, np.ndarray)}


def compute_steady_seconds(linked: Linked, variants: Iterable[TimelineInstructions]) -> FloatArray:
    """Seconds of one round of the steps in each variant: the same instructions (see `select_marked_steps`) with other
    lengths.

    They are asked for a few at a time, so that many variants of a long trace need not be held at once.
    """
    coming = iter(variants)
    batch, parts = list(islice(coming, 1)), []
    size = max(_MOST_VALUES // max(len(batch[0].row), 1), 1)
    batch += islice(coming, size - 1)
    while batch:
        parts.append(_simulate_until_settled(linked, batch))
        batch = list(islice(coming, size))
    return np.concatenate(parts)


def _simulate_until_settled(linked: Linked, variants: Sequence[TimelineInstructions]) -> FloatArray:
    if not linked.marked:  # no step but a whole program
        return next(_simulate_rounds(variants, 1)).latest()
    done = [simulated.latest() for simulated in _simulate_rounds(variants, _ROUNDS)]
    return np.asarray((done[-1] - done[_SETTLED - 1]) / (_ROUNDS - _SETTLED))


def find_steady_path(instructions: TimelineInstructions) -> list[Segment]:
    """The path through one round of the steps (see `select_marked_steps`) as they go on, over as long as a round takes.

    Where the host keeps the pace it leads to the end of its main thread: what the device has left to do then delays
    nothing. Where the host runs ahead of the device it leads to the end of all. Where it comes from repeats itself with
    every round, but not where it ends: that may be work which nothing later waits for. So its last step is left out,
    and as long as a round takes before that counts. What a round waits for may be in the one before: several are
    simulated as one.
    """
    count, steps = len(instructions.row), int((instructions.row == STEP_EDGE).sum())
    as_one = 2 if steps > 1 else 3
    rounds = _simulate_rounds([_select_instructions(instructions, np.tile(np.arange(count), as_one))], 2)
    before = _find_ends(next(rounds))
    last = next(rounds)
    pace, host_pace = ((now - then) / as_one for now, then in zip(_find_ends(last), before, strict=True))
    left_out = pace / steps
    path = find_critical_path(
        [last],
        thread=0 if host_pace > (1 - _SAME_PACE) * pace else None,
        seconds=(pace + left_out) * (1 + _SAME_PACE),  # a little more than is needed: sums are rounded
    )
    end = path[-1].end - left_out if path else 0.0
    return [
        replace(
            segment,
            instruction=segment.instruction % count,
            start=max(segment.start, end - pace),
            end=min(segment.end, end),
        )
        for segment in path
        if segment.end > end - pace and segment.start < end
    ]


def _find_ends(simulated: GroupSimulation) -> tuple[float, float]:
    """When everything is done, and when the main thread is."""
    return float(simulated.latest()[0]), simulated.clocks()[0].threads[0]


def simulate_once(instructions: TimelineInstructions) -> GroupSimulation:
    """All instructions simulated once, from the trace's first moment."""
    return next(_simulate_rounds([instructions], 1))


def _simulate_rounds(variants: Sequence[TimelineInstructions], count: int) -> Iterator[GroupSimulation]:
    """The instructions simulated `count` times in a row, side by side with other lengths."""
    first = variants[0]
    group = RankGroup(
        first.schedule,
        np.stack([variant.host_seconds for variant in variants]),
        np.stack([variant.device_seconds for variant in variants]),
    )
    clocks = [Clocks.at_zero(first.schedule, first.gap)] * len(variants)
    for _ in range(count):
        (simulated,) = simulate_ranks([group], Collectives.none(), gap=first.gap, clocks=[clocks])
        clocks = simulated.clocks()
        yield simulated
        del simulated  # while the next round is simulated
