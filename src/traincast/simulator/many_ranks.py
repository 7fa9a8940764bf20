"""The simulation over many ranks, those of equal instructions side by side: host threads and streams, tied where
kernels meet.

A collective starts on each rank when its stream comes to it, and ends on all of them when the last one has arrived and
the collective is done. A block of a rank's step is simulated as soon as all it needs is known, so that independent
communicators and messages in opposite directions overlap, and what can never be known is a deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from traincast.simulator.schedule import Block, BlockKind, Blocks, Code, Schedule, cut_schedule_at_collectives
from traincast.utils.arrays import FloatArray, IndexArray, IntArray
from traincast.utils.errors import TraincastError

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
        """`like` is an earlier simulation of the rank group; `kernel_seconds` stand in for the rank group's own."""
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


__all__ = [
    "CollectiveIndex",
    "Collectives",
    "Deadlock",
    "GroupSimulation",
    "RankGroup",
    "WaitingLaunch",
    "simulate_ranks",
]


@dataclass(frozen=True, eq=False, slots=True)
class Collectives:
    """Which launches are one collective: one entry per launch that takes part, and `seconds` per collective.

    Launch `instruction` of rank `row` of rank group `group` takes part in collective `collective`, which ends on all
    its members `seconds[collective]` after the last of them started. A rank group's ranks have their collectives at the
    same instructions.
    """

    collective: IntArray
    group: IntArray
    row: IntArray
    instruction: IntArray
    seconds: FloatArray

    @staticmethod
    def none() -> Collectives:
        """Nobody meets anybody."""
        empty = np.empty(0, dtype=np.int64)
        return Collectives(empty, empty, empty, empty, np.empty(0))


@dataclass(frozen=True, slots=True)
class WaitingLaunch:
    """A launch that waits for ever: entry `entry` of the collectives, and the entries that never arrive."""

    entry: int
    missing: tuple[int, ...]


class Deadlock(TraincastError):
    """Ranks wait for each other for ever. `waiting` are the launches that arrived, in order of their entries."""

    def __init__(self, waiting: tuple[WaitingLaunch, ...]) -> None:
        super().__init__(f"{len(waiting)} collectives wait for ranks that never arrive")
        self.waiting = waiting


class CollectiveIndex:
    """The collectives of rank groups, prepared: which blocks they are, and who takes part in each."""

    def __init__(self, groups: Sequence[RankGroup], collectives: Collectives) -> None:
        self.collectives, self.sizes = collectives, [group.size for group in groups]
        places = [np.unique(collectives.instruction[collectives.group == number]) for number in range(len(groups))]
        self.blocks = [
            cut_schedule_at_collectives(c.schedule, tuple(met.tolist())) for c, met in zip(groups, places, strict=True)
        ]
        self.count = np.bincount(collectives.collective, minlength=len(collectives.seconds))

    @cached_property
    def together(self) -> dict[int, int] | None:
        """Block -> collective, if there is one rank group and all its ranks meet at one instruction every time; else
        None."""
        m = self.collectives
        if len(self.sizes) != 1 or np.any(self.count != self.sizes[0]):
            return None
        first = np.zeros(len(self.count), dtype=np.int64)
        first[m.collective] = m.instruction
        if np.any(first[m.collective] != m.instruction):
            return None
        return {self.blocks[0].collective_blocks[int(i)]: collective for collective, i in enumerate(first.tolist())}

    @cached_property
    def block(self) -> IntArray:
        """The block of every entry."""
        places = zip(self.collectives.group.tolist(), self.collectives.instruction.tolist(), strict=True)
        return np.array([self.blocks[group].collective_blocks[i] for group, i in places], dtype=np.int64)

    @cached_property
    def members(self) -> list[IntArray]:
        """The entries of every collective, in order of rank group, block and row."""
        m = self.collectives
        order = np.lexsort((m.row, self.block, m.group, m.collective))
        return np.split(order, np.cumsum(self.count)[:-1])

    @cached_property
    def entry(self) -> dict[tuple[int, int], IntArray]:
        """The entry of every rank of a rank group at each of its collectives, by rank group and block."""
        table = {
            (group, block): np.full(self.sizes[group], -1, dtype=np.int64)
            for group, blocks in enumerate(self.blocks)
            for block in blocks.collective_blocks.values()
        }
        entries = np.arange(len(self.block))
        for part in _group_by_key(entries, self.keys(entries)):
            table[int(self.collectives.group[part[0]]), int(self.block[part[0]])][self.collectives.row[part]] = part
        if any(bool(np.any(entries < 0)) for entries in table.values()):
            raise AssertionError("the ranks of a rank group must have their collectives at the same instructions")
        return table

    def keys(self, entries: IntArray) -> IntArray:
        """A number for the rank group and block of entries."""
        most = max(len(blocks.blocks) for blocks in self.blocks)
        return np.asarray(self.collectives.group[entries] * most + self.block[entries])


def simulate_ranks(
    groups: Sequence[RankGroup],
    collectives: Collectives,
    *,
    gap: float = 0.0,
    clocks: Sequence[Sequence[Clocks]] | None = None,
    index: CollectiveIndex | None = None,
    like: Sequence[GroupSimulation] | None = None,
    kernel_seconds: Sequence[FloatArray] | None = None,
) -> list[GroupSimulation]:
    """Executes the instructions of all rank groups from their `clocks` (default: idle at 0).

    `gap` is the time in seconds between kernels queued in one stream. Raises `Deadlock` on a deadlock. Simulates of the
    same rank groups may share an `index`, take from one `like` them what cannot have changed, and have `kernel_seconds`
    (see `GroupSimulation`) in place of the rank groups' own.
    """
    index = index or CollectiveIndex(groups, collectives)
    simulations = []
    for number, group in enumerate(groups):
        begin = clocks[number] if clocks else [Clocks.at_zero(group.schedule, gap)] * group.size
        earlier, kernels = like[number] if like else None, kernel_seconds[number] if kernel_seconds else None
        simulations.append(GroupSimulation(group, index.blocks[number], begin, gap, earlier, kernels))
    if len(collectives.collective) and index.together is None:
        _Dataflow(simulations, index).run()
        return simulations
    for simulation in simulations:
        _simulate_in_order(simulation, collectives.seconds, index.together or {})
    return simulations


def _simulate_in_order(simulation: GroupSimulation, seconds: FloatArray, collectives: dict[int, int]) -> None:
    """Simulates ranks that meet nobody, or always all of each other: blocks can be taken in their order."""
    for number, block in enumerate(simulation.blocks.blocks):
        simulation.run(block, ALL)
        if block.kind == BlockKind.COLLECTIVE:
            simulation.values[block.begin] = simulation.starts[block.first].max() + seconds[collectives[number]]


class _Dataflow:
    """Simulates blocks of several rank groups as what they need becomes known."""

    def __init__(self, simulations: list[GroupSimulation], index: CollectiveIndex) -> None:
        self.simulations, self.agenda, self.collectives = simulations, index, index.collectives
        # what each block of each rank group still needs: one number while all ranks agree, else one per rank
        self.needs: list[list[int | IntArray]] = [list(blocks.needs) for blocks in index.blocks]
        self.queue: list[tuple[int, int]] = []  # (block, rank group): earliest first, so that ranks stay side by side
        self.ready: dict[tuple[int, int], list[Rows]] = {}
        self.missing = index.count.copy()
        self.last = np.full(len(self.missing), -np.inf)

    def run(self) -> None:
        for group, simulation in enumerate(self.simulations):
            for block, needs in enumerate(simulation.blocks.needs):
                if needs == 0:
                    self._push(group, block, ALL)
        while self.queue:
            block, group = heapq.heappop(self.queue)
            simulation = self.simulations[group]
            parts = self.ready.pop((block, group))
            rows = parts[0] if len(parts) == 1 else self._union(parts, simulation.group.size)
            simulation.run(simulation.blocks.blocks[block], rows)
            if simulation.blocks.blocks[block].kind == BlockKind.COLLECTIVE:
                self._arrive(group, block, rows)
            else:
                self._finish(group, block, rows)
        if np.any(self.missing > 0):
            raise self._stuck()

    def _push(self, group: int, block: int, rows: Rows) -> None:
        key = (block, group)
        if key not in self.ready:
            heapq.heappush(self.queue, key)
            self.ready[key] = []
        self.ready[key].append(rows)

    @staticmethod
    def _union(parts: list[Rows], size: int) -> Rows:
        rows = np.concatenate([part for part in parts if not isinstance(part, slice)])
        return ALL if len(rows) == size else rows

    def _finish(self, group: int, block: int, rows: Rows) -> None:
        """What needed this block needs one thing less."""
        needs = self.needs[group]
        for successor in self.simulations[group].blocks.successors[block]:
            count = needs[successor]
            if isinstance(count, int) and isinstance(rows, slice):
                needs[successor] = count - 1
                if count == 1:
                    self._push(group, successor, ALL)
                continue
            if isinstance(count, int):
                count = needs[successor] = np.full(self.simulations[group].group.size, count, dtype=np.int64)
            count[rows] -= 1
            done = np.flatnonzero(count == 0) if isinstance(rows, slice) else rows[count[rows] == 0]
            if len(done):
                self._push(group, successor, ALL if len(done) == len(count) else done)

    def _arrive(self, group: int, block: int, rows: Rows) -> None:
        """Ranks have come to a collective; whichever collectives are complete end."""
        if self.simulations[group].group.size == 1:
            self._arrive_alone(group, block)
            return
        collective = self.collectives.collective[self.agenda.entry[group, block][rows]]
        simulation = self.simulations[group]
        np.maximum.at(self.last, collective, simulation.starts[simulation.blocks.blocks[block].first, rows])
        np.subtract.at(self.missing, collective, 1)
        complete = np.unique(collective[self.missing[collective] == 0])
        if len(complete):
            entries = np.concatenate([self.agenda.members[m] for m in complete.tolist()])
            for part in _group_by_key(entries, self.agenda.keys(entries)):
                self._end(part)

    def _arrive_alone(self, group: int, block: int) -> None:
        """As `_arrive` for a rank group of one rank: without arrays."""
        simulation = self.simulations[group]
        collective = int(self.collectives.collective[self.agenda.entry[group, block][0]])
        start = simulation.starts[simulation.blocks.blocks[block].first, 0]
        self.last[collective] = max(self.last[collective], start)
        self.missing[collective] -= 1
        if self.missing[collective] == 0:
            for part in _group_by_key(
                self.agenda.members[collective], self.agenda.keys(self.agenda.members[collective])
            ):
                self._end(part)

    def _end(self, entries: IntArray) -> None:
        """Ends a collective for the ranks of one rank group at one instruction."""
        m = self.collectives
        group, block, rows = int(m.group[entries[0]]), int(self.agenda.block[entries[0]]), m.row[entries]
        simulation = self.simulations[group]
        every: Rows = ALL if len(rows) == simulation.group.size else rows
        collective = m.collective[entries]
        simulation.values[simulation.blocks.blocks[block].begin, rows] = self.last[collective] + m.seconds[collective]
        self._finish(group, block, every)

    def _stuck(self) -> Deadlock:
        arrived = np.zeros(len(self.collectives.collective), dtype=bool)
        for (group, block), entries in self.agenda.entry.items():
            arrived[entries] = np.asarray(self.needs[group][block]) == 0
        waiting = []
        for entry in np.flatnonzero(arrived & (self.missing[self.collectives.collective] > 0)).tolist():
            members = self.agenda.members[self.collectives.collective[entry]]
            waiting.append(WaitingLaunch(entry, tuple(sorted(members[~arrived[members]].tolist()))))
        return Deadlock(tuple(waiting))


def _group_by_key(entries: IntArray, keys: IntArray) -> list[IntArray]:
    """Entries of equal keys together."""
    if np.all(keys == keys[0]):
        return [entries]
    order = np.argsort(keys, kind="stable")
    return np.split(entries[order], np.flatnonzero(np.diff(keys[order])) + 1)


def simulate_rank(
    schedule: Schedule, host_seconds: FloatArray, kernel_seconds: FloatArray, clocks: Clocks, *, gap: float = 0.0
) -> RankTimes:
    """Executes the instructions, moving `clocks` on. `host_seconds` is per instruction, `kernel_seconds` per
    instruction too (used by launches); `gap` is the time in seconds between kernels queued in one stream."""
    group = RankGroup(schedule, host_seconds[None, :], kernel_seconds[None, :])
    (simulated,) = simulate_ranks([group], Collectives.none(), gap=gap, clocks=[[clocks]])
    (after,) = simulated.clocks()
    clocks.threads, clocks.streams, clocks.events = after.threads, after.streams, after.events
    return simulated.times(0)
