"""Ranks that execute the same instructions, simulated side by side, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from traincast.simulator.blocks import Block, BlockKind, Blocks
from traincast.simulator.schedule import Code, Schedule
from traincast.utils.arrays import FloatArray, IndexArray

Rows = IndexArray | slice  # some ranks of a rank group; the slice means all of them
ALL = slice(None)


@dataclass(frozen=True, eq=False, slots=True)
class RankGroup:
    """Ranks that execute the same instructions. Seconds are float64[ranks, instructions]. `transfers` are instructions
    that launch collectives which end by themselves."""

    schedule: Schedule
    host_seconds: FloatArray
    kernel_seconds: FloatArray
    transfers: IndexArray = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    fills: IndexArray = field(default_factory=lambda: np.empty(0, dtype=np.intp))

    def find_launches(self, blocks: Blocks, instructions: IndexArray) -> IndexArray:
        """Where `transfers` or `fills` are among the launches in the order of `blocks`."""
        launches = np.flatnonzero(self.schedule.code == Code.LAUNCH)
        return blocks.launch_place[np.searchsorted(launches, instructions)]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.kernel_seconds)


class GroupSimulation:
    """What the simulation made of one rank group: times of every rank, in seconds.

    `values` is float64[columns, ranks] (see `blocks.py`); `kernel_seconds`, `starts` and `ends` are
    float64[launches, ranks] in the order of `blocks.launch_order`: ranks side by side, so that what is done to all of
    them at once is done to neighbours in memory.
    """

    def __init__(
        self,
        group: RankGroup,
        blocks: Blocks,
        clocks: Sequence[Clocks],
        gap: float,
        like: GroupSimulation | None = None,
        kernel_seconds: FloatArray | None = None,
    ) -> None:
        """`like` is an earlier walk of the rank group; `kernel_seconds` stand in for the rank group's own."""
        self.group, self.blocks, self.gap = group, blocks, gap
        self.values = np.empty((blocks.num_columns, group.size))
        self.starts = np.empty((len(blocks.launch_order), group.size))
        for row, clock in enumerate(clocks):
            self.values[: blocks.host_begin, row] = [*clock.threads, *clock.streams, *clock.events]
        self.kernel_seconds = _stack_ranks(group.kernel_seconds, blocks.launch_order)
        if kernel_seconds is not None:
            self.kernel_seconds = kernel_seconds
        threads = len(blocks.threads)
        # host work that the device cannot delay is as it was in a simulation from the same clocks
        self.known = like is not None and np.array_equal(like.values[:threads], self.values[:threads])
        self._host: FloatArray
        if like is not None and self.known:
            hosts = slice(blocks.host_begin, blocks.launch_begin)
            self.values[hosts] = like.values[hosts]
            self._host = like._host
        else:
            self._host = _stack_ranks(group.host_seconds, blocks.host_order)

    def times(self, row: int) -> RankTimes:
        """The times of one rank."""
        blocks, values = self.blocks, self.values[:, row]
        after = np.empty(len(blocks.host_order))
        after[blocks.host_order] = values[blocks.host_begin : blocks.launch_begin]
        issue = after
        if len(blocks.held):
            issue = after.copy()
            issue[blocks.held] = values[blocks.held_after] + self.group.host_seconds[row, blocks.held]
        order = blocks.launch_place
        return RankTimes(issue, after, self.starts[order, row], self.ends[order, row])

    @property
    def ends(self) -> FloatArray:
        """Ends of all kernels."""
        begin = self.blocks.launch_begin
        return self.values[begin : begin + len(self.blocks.launch_order)]

    def latest(self) -> FloatArray:
        """When everything of each rank is done, in seconds."""
        columns = [*self.blocks.threads, *(column for stream in self.blocks.streams for column in stream)]
        done: FloatArray = self.values[columns].max(axis=0)
        return done

    def clocks(self) -> list[Clocks]:
        """Where each rank stands at the end."""
        threads = self.values[list(self.blocks.threads)].T.tolist()
        streams, events = (
            np.array([self._latest_of(columns, ALL) for columns in clocks]).reshape(len(clocks), self.group.size).T
            for clocks in (self.blocks.streams, self.blocks.events)
        )
        return [Clocks(*moments) for moments in zip(threads, streams.tolist(), events.tolist(), strict=True)]

    def run(self, block: Block, rows: Rows) -> None:
        """Simulates one block of some ranks; a collective gets its start only."""
        if block.kind == BlockKind.HOST:
            if not (self.known and block.ahead):
                self._run_host(block, rows)
        else:
            self._run_kernels(block, rows)

    def _latest_of(self, columns: Sequence[int], rows: Rows) -> FloatArray:
        latest: FloatArray = self.values[columns[0], rows]
        for column in columns[1:]:
            latest = np.maximum(latest, self.values[column, rows])
        return latest

    def _run_host(self, block: Block, rows: Rows) -> None:
        length = block.end - block.begin
        first = self.values[block.after, rows] + self._host[block.first, rows]
        if block.held:
            first = np.maximum(first, self._latest_of(block.waits, rows))
        if length == 1:
            self.values[block.begin, rows] = first
            return
        steps = self._host[block.first : block.first + length, rows]
        if steps.strides[1] == 0 and np.all(first == first[0]):  # the same hosts at the same time
            steps, first = steps[:, :1], first[:1]
        steps = np.array(steps)
        steps[0] = first
        self.values[block.begin : block.end, rows] = np.add.accumulate(steps, axis=0)

    def _run_kernels(self, block: Block, rows: Rows) -> None:
        """A kernel starts when it is issued or when the one before is done: start = issue + the longest queue."""
        free = self._latest_of(block.waits, rows) + self.gap
        low, high = block.first, block.first + block.end - block.begin
        if high == low + 1:
            start = np.maximum(self.values[block.issue[0], rows], free)
            self.starts[low, rows] = start
            if block.kind == BlockKind.KERNELS:
                self.values[block.begin, rows] = start + self.kernel_seconds[low, rows]
            return
        issue = self.values[block.issue] if isinstance(rows, slice) else self.values[np.ix_(block.issue, rows)]
        kernel = self.kernel_seconds[low:high, rows]
        before = kernel + self.gap  # becomes what the kernels before it in the run take
        np.add.accumulate(before[:-1], axis=0, out=before[1:])
        before[0] = 0.0
        lead = issue - before
        np.maximum(lead[0], free, out=lead[0])
        starts = np.maximum.accumulate(lead, axis=0)
        starts += before
        np.maximum(starts, issue, out=starts)
        self.starts[low:high, rows] = starts
        self.values[block.begin : block.end, rows] = starts + kernel


def _stack_ranks(seconds: FloatArray, order: IndexArray) -> FloatArray:
    """float64[ranks, instructions] as float64[`order`, ranks]; ranks that are one and the same stay so."""
    if len(seconds) > 1 and seconds.strides[0] == 0:
        return np.broadcast_to(seconds[0, order][:, None], (len(order), len(seconds)))
    return np.ascontiguousarray(seconds[:, order].T)


@dataclass(slots=True)
class Clocks:
    """Where every host thread, stream and event stands, in seconds."""

    threads: list[float]
    streams: list[float]
    events: list[float] = field(default_factory=list)

    @staticmethod
    def at_zero(schedule: Schedule, gap: float = 0.0) -> Clocks:
        """Everything idle at time 0: streams ended their last kernel a `gap` ago."""
        return Clocks([0.0] * schedule.num_threads, [-gap] * schedule.num_streams, [0.0] * schedule.num_events)

    @property
    def latest(self) -> float:
        """When everything issued so far is done."""
        return max(*self.threads, *self.streams)


@dataclass(frozen=True, eq=False, slots=True)
class RankTimes:
    """What one simulation did: host time after every instruction, and start and end of every launch, in seconds.

    `host_issue` is the host time of an instruction before any waiting, so `host_after - host_issue` is the time
    it was held by a synchronisation.
    """

    host_issue: FloatArray
    host_after: FloatArray
    kernel_start: FloatArray
    kernel_end: FloatArray
