"""What a step looks like in time: every launch and host op, totals, and the critical path that its length is made of.

The simulation only ever takes maxima and adds durations, so what held a value back is the latest of the few values it
was made of. The path is followed backwards from the end of the step; at a collective it goes over to the rank that came
last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from traincast.costs.kernels.contract import KernelCall
from traincast.ir.program import Program
from traincast.simulator.many_ranks import Collectives, GroupSimulation, RankTimes
from traincast.simulator.schedule import Block, BlockKind, Code, Schedule
from traincast.utils.arrays import FloatArray, Int32Array
from traincast.utils.metrics import sum_by_key


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


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the critical path on one rank (`row` of `group`), seconds on the simulation's clock.

    `where` is "host" or "device"; `instruction` indexes the schedule (for the device: its launch).
    """

    where: str
    instruction: int
    start: float
    end: float
    group: int = 0
    row: int = 0

    @property
    def seconds(self) -> float:
        """Length of the stretch."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PathPart:
    """A stretch of the path in words: on rank `rank`, in seconds on the simulation's clock.

    `what` is "host" or the kernel family, `op` the top-level host op or the op that launched the kernel ("" for none),
    `name` what a timeline calls it.
    """

    rank: int
    what: str
    op: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the stretch."""
        return self.end - self.start


def find_critical_path(
    simulations: Sequence[GroupSimulation],
    collectives: Collectives | None = None,
    *,
    thread: int | None = None,
    seconds: float = math.inf,
) -> list[Segment]:
    """The segments from the start of the step to its end over all ranks, in order; adjacent ones touch.

    With `thread` the path leads to where that host thread of the first rank ends, not to the last moment of all. With
    `seconds` only those that reach into so long before the end are sought.
    """
    backtrace = _Backtrace(simulations, collectives or Collectives.none())
    end = None if thread is None else (0, 0, simulations[0].blocks.threads[thread])
    return backtrace.follow(end, seconds)[::-1]


class _Backtrace:
    """Goes from a value to the one it had to wait for. A value is a column of a rank: (rank group, row, column)."""

    def __init__(self, simulations: Sequence[GroupSimulation], collectives: Collectives) -> None:
        self.simulations, self.collectives = simulations, collectives
        places = zip(
            collectives.group.tolist(), collectives.row.tolist(), collectives.instruction.tolist(), strict=True
        )
        self.collective_at = dict(zip(places, collectives.collective.tolist(), strict=True))
        order = np.argsort(collectives.collective, kind="stable")
        edges = np.flatnonzero(np.diff(collectives.collective[order])) + 1
        self.members = {int(collectives.collective[part[0]]): part for part in np.split(order, edges) if len(part)}

    def follow(self, end: tuple[int, int, int] | None = None, seconds: float = math.inf) -> list[Segment]:
        path: list[Segment] = []
        group, row, column = end or self._end()
        since = float(self.simulations[group].values[column, row]) - seconds
        while self.simulations[group].blocks.owner[column] >= 0 and self.simulations[group].values[column, row] > since:
            group, row, column, segment = self._step(group, row, column)
            if segment is not None and segment.end > segment.start:
                path.append(segment)
        return path

    def _end(self) -> tuple[int, int, int]:
        """The value that was there last; of equal ones that of the first rank, and the host's before the device's."""
        latest = [simulation.latest() for simulation in self.simulations]
        group = int(np.argmax([moments.max() for moments in latest]))
        row = int(np.argmax(latest[group]))
        blocks = self.simulations[group].blocks
        columns = [*blocks.threads, *(column for stream in blocks.streams for column in stream)]
        return group, row, self._latest(group, row, columns)

    def _latest(self, group: int, row: int, columns: Sequence[int]) -> int:
        values = self.simulations[group].values[:, row]
        return max(columns, key=lambda column: values[column])

    def _step(self, group: int, row: int, column: int) -> tuple[int, int, int, Segment | None]:
        """What a value had to wait for, and the stretch between the two."""
        blocks = self.simulations[group].blocks
        block = blocks.blocks[blocks.owner[column]]
        if block.kind == BlockKind.HOST:
            return group, row, *self._host(group, row, column, block)
        end = float(self.simulations[group].values[column, row])
        if block.kind == BlockKind.COLLECTIVE:
            group, row, column = self._last_to_come(group, row, block)
            blocks = self.simulations[group].blocks
            block = blocks.blocks[blocks.owner[column]]
        return group, row, *self._kernel(group, row, column, block, end)

    def _host(self, group: int, row: int, column: int, block: Block) -> tuple[int, Segment | None]:
        simulation = self.simulations[group]
        instruction = int(simulation.blocks.host_order[column - simulation.blocks.host_begin])
        before = column - 1 if column > block.begin else block.after
        start, end = float(simulation.values[before, row]), float(simulation.values[column, row])
        if block.held and column == block.begin:
            release = self._latest(group, row, block.waits)
            if simulation.values[release, row] > start + simulation.group.host_seconds[row, instruction]:
                return release, None
        return before, Segment("host", instruction, start, end, group, row)

    def _kernel(self, group: int, row: int, column: int, block: Block, end: float) -> tuple[int, Segment]:
        """A kernel began when its launch returned, when the one before it was done, or when an event let it.

        The gap to the one before belongs to it.
        """
        simulation = self.simulations[group]
        cause = int(block.issue[column - block.begin])
        before = column - 1 if column > block.begin else self._latest(group, row, block.waits)
        if simulation.values[before, row] + simulation.gap > simulation.values[cause, row]:
            cause = before
        instruction = int(simulation.blocks.launch_order[column - simulation.blocks.launch_begin])
        return cause, Segment("device", instruction, float(simulation.values[cause, row]), end, group, row)

    def _last_to_come(self, group: int, row: int, block: Block) -> tuple[int, int, int]:
        """The value of the member of a collective that all others waited for; of equal ones the first."""
        instruction = int(self.simulations[group].blocks.launch_order[block.first])
        members = self.members[self.collective_at[group, row, instruction]]
        m = self.collectives
        places = [self._place(int(m.group[e]), int(m.instruction[e])) for e in members.tolist()]
        starts = [
            float(self.simulations[c].starts[first, r])
            for c, r, (_, first) in zip(m.group[members].tolist(), m.row[members].tolist(), places, strict=True)
        ]
        last = int(np.argmax(starts))
        return int(m.group[members[last]]), int(m.row[members[last]]), places[last][0]

    def _place(self, group: int, instruction: int) -> tuple[int, int]:
        """Column of the end, and number of the start, of a collective's kernel."""
        blocks = self.simulations[group].blocks
        block = blocks.blocks[blocks.collective_blocks[instruction]]
        return block.begin, block.first
