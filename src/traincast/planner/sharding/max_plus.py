"""A rank's simulation with the durations that a plan decides left open, compiled once, evaluated for thousands of plans
at a time.

A simulation only adds and takes maxima. With all but a few durations known, every clock is the largest of a few
registers plus constants; a register is the end of a kernel or of host work whose duration is open, of a collective with
other ranks, or of instructions that only some ranks run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from traincast.models.placement.plan import ShardingKind
from traincast.models.sharded_dlrm.layout import ScopeRole
from traincast.simulator.schedule import Code, Schedule
from traincast.utils.arrays import FloatArray


class Part(StrEnum):
    """What is open alongside the roles that the writer of the step marks: parts of an update, and work of the host."""

    SORT = "sort"
    """What comes before the kernel of an update."""
    BACKWARD = "backward"
    """The kernel of an update."""
    COPIES = "copies"
    """The collective of the gradients of copied tables."""
    VIEWS = "views"
    """Host: pooled rows as rows again, one per sender."""
    GRADIENTS = "gradients"
    """Host: gradients that are joined, one per sender."""
    LAUNCHES = "launches"
    """Host: the launches of the sort."""
    FILLS = "fills"
    """Host: the launches that fill the cache of tables in host memory."""
    HELD = "held"
    """No duration, but 1 on ranks that have tables of a group and 0 on the others."""


EXCHANGES = frozenset(
    {
        ScopeRole.SIZES,
        ScopeRole.LENGTHS,
        ScopeRole.VALUES,
        ScopeRole.OUT,
        ScopeRole.OUT_ACROSS,
        ScopeRole.BACK,
        ScopeRole.BACK_WITHIN,
        ScopeRole.DENSE,
    }
)
"""Roles of which the collective is open, not kernels."""
SMALL = frozenset(
    {ScopeRole.ORDER, ScopeRole.BUCKET, ScopeRole.ARRIVE, ScopeRole.BESIDE, ScopeRole.JOIN, Part.SORT, ScopeRole.STEP}
)
"""Open kernels that are themselves among the small ones around them."""
_NODE_MEETINGS: dict[ScopeRole | Part, str] = {
    ScopeRole.OUT: "within", ScopeRole.OUT_ACROSS: "across", ScopeRole.BACK: "across", ScopeRole.BACK_WITHIN: "within",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """An open duration: its role for a kind of sharding (None: for all), and for which of its groups where it has
    several (-1: for all); `number` tells several of one role apart."""

    role: ScopeRole | Part
    kind: ShardingKind | None = None
    group: int = -1
    number: int = 0

    @property
    def collective(self) -> str:
        """Who must have arrived before it starts ("" for kernels and host work: nobody else): all ranks ("world"),
        those of a node ("within"), one of each node ("across")."""
        if self.role not in EXCHANGES and self.role is not Part.COPIES:
            return ""
        if self.kind is ShardingKind.TABLE_ROW_WISE:
            return _NODE_MEETINGS.get(self.role, "world")
        return "world"


Clock: TypeAlias = dict[int, float]  # register -> seconds after it; the latest counts
ORIGIN = 0
"""The register of time 0."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Instructions [first, last) that a rank runs only where the "duration" of `slot` is not 0; where it is, their
    thread is busy for `instead` seconds in their place."""

    first: int
    last: int
    slot: Slot
    instead: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Register:
    """The end of an open kernel that starts at the latest of `start`; or, with `otherwise`, the latest of `start` on
    ranks whose "duration" is not 0 and the latest of `otherwise` on the others."""

    start: Clock
    slot: Slot
    otherwise: Clock | None = None


@dataclass(frozen=True, eq=False, slots=True)
class SimulationCode:
    """Registers in order of evaluation, and when a rank is done with the first step and with the second."""

    registers: tuple[Register, ...]
    first: Clock
    second: Clock

    def seconds(self, durations: Mapping[Slot, FloatArray], gpus_per_node: int, shape: tuple[int, int]) -> FloatArray:
        """Time from one step to the next of `shape` = (plans, ranks); each duration is [plans, ranks] or [plans, 1]."""
        values: list[FloatArray] = [np.zeros((1, 1))]
        for register in self.registers:
            start, duration = _find_latest(register.start, values), durations[register.slot]
            if register.otherwise is not None:
                values.append(np.where(duration > 0.0, start, _find_latest(register.otherwise, values)))
                continue
            if register.slot.collective:
                start = _find_last_arrival(start, register.slot.collective, gpus_per_node, shape)
            values.append(start + duration)
        done = [_find_latest(clock, values).max(axis=1) for clock in (self.first, self.second)]
        return np.asarray(np.broadcast_to(done[1] - done[0], shape[:1]))


def _find_latest(clock: Clock, values: Sequence[FloatArray]) -> FloatArray:
    """The latest of registers plus seconds; those that all ranks share first, for they are small."""
    latest: FloatArray | None = None
    for register, seconds in sorted(clock.items(), key=lambda entry: values[entry[0]].shape[1]):
        other = values[register] + seconds
        if latest is None:
            latest = other
        elif latest.shape == other.shape:
            np.maximum(latest, other, out=latest)
        else:
            latest = np.maximum(latest, other)
    assert latest is not None
    return latest


def _find_last_arrival(start: FloatArray, collective: str, gpus_per_node: int, shape: tuple[int, int]) -> FloatArray:
    """When the last rank of each group has arrived."""
    if start.shape[1] == 1 or collective == "world":
        return np.asarray(start.max(axis=1, keepdims=True))
    ranks = shape[1]
    nodes = -(-ranks // gpus_per_node)
    padded = np.full((len(start), nodes * gpus_per_node), -np.inf)
    padded[:, :ranks] = start
    axis = 2 if collective == "within" else 1
    by_node = padded.reshape(len(start), nodes, gpus_per_node)
    last = np.broadcast_to(by_node.max(axis=axis, keepdims=True), by_node.shape)
    return last.reshape(len(start), -1)[:, :ranks]


class _Compiler:
    """Clocks of one rank, as the simulation moves them on."""

    def __init__(self, schedule: Schedule, gap: float) -> None:
        self.registers: list[Register] = []
        self.gap = gap
        self.threads: list[Clock] = [{ORIGIN: 0.0} for _ in range(schedule.num_threads)]
        self.streams: list[Clock] = [{ORIGIN: -gap} for _ in range(schedule.num_streams)]
        self.events: list[Clock] = [{ORIGIN: 0.0} for _ in range(schedule.num_events)]
        # seconds by which a register is known to come after an earlier one, so that the earlier need not be kept
        self._after: list[Clock] = [{}]

    def latest(self, *clocks: Clock) -> Clock:
        """The later of clocks, without registers that another one surely follows."""
        merged: Clock = {}
        for clock in clocks:
            for register, seconds in clock.items():
                merged[register] = max(merged.get(register, -np.inf), seconds)
        if len(merged) == 1:
            return merged
        kept = dict(merged)
        for register, seconds in merged.items():
            after = self._after[register]
            for earlier, other in merged.items():
                if earlier in after and seconds + after[earlier] >= other:
                    kept.pop(earlier, None)
        return kept

    def open(self, start: Clock, slot: Slot, otherwise: Clock | None = None) -> Clock:
        """A new register for the end of an open kernel, or (`otherwise`) of what only some ranks run."""
        self.registers.append(Register(start, slot, otherwise))
        least = start if otherwise is None else otherwise  # what is skipped would only have come later
        known = dict(least)
        for register, seconds in least.items():
            for earlier, lead in self._after[register].items():
                known[earlier] = max(known.get(earlier, -np.inf), seconds + lead)
        self._after.append(known)
        return {len(self.registers): 0.0}

    def _list_clocks(self, waiting: list[float]) -> tuple[list[Clock], list[Clock], list[Clock]]:
        """All clocks, with the seconds that threads have been busy since."""
        self.threads = [
            _delay_clock(one, late) if late else one for one, late in zip(self.threads, waiting, strict=True)
        ]
        waiting[:] = [0.0] * len(waiting)
        return self.threads.copy(), self.streams.copy(), self.events.copy()

    def _choose(self, skip: Skip, before: tuple[list[Clock], list[Clock], list[Clock]], thread: int) -> None:
        """Every clock that the skipped instructions moved is where they left it, or where it was."""
        for clocks, earlier in zip((self.threads, self.streams, self.events), before, strict=True):
            for number, clock in enumerate(clocks):
                if clock is not earlier[number]:
                    late = skip.instead if clocks is self.threads and number == thread else 0.0
                    clocks[number] = self.open(clock, skip.slot, _delay_clock(earlier[number], late))

    def run(
        self, schedule: Schedule, host: FloatArray, kernel: FloatArray, opened: Mapping[int, Slot],
        late: Mapping[int, Slot], skips: Sequence[Skip],
    ) -> None:  # fmt: skip
        """One step, as the simulator takes it."""
        begins, ends = {skip.first for skip in skips}, {skip.last: skip for skip in skips}
        before: tuple[list[Clock], list[Clock], list[Clock]] = ([], [], [])
        columns = zip(
            schedule.code.tolist(), schedule.thread.tolist(), schedule.target.tolist(), schedule.event.tolist(),
            host.tolist(), kernel.tolist(), strict=True,
        )  # fmt: skip
        waiting = [0.0] * schedule.num_threads  # seconds that threads have been busy since they last met anything
        for number, (code, thread, target, event, busy, lasting) in enumerate(columns):
            if number in ends:
                self._list_clocks(waiting)
                self._choose(ends[number], before, int(schedule.thread[ends[number].first]))
            if number in begins:
                before = self._list_clocks(waiting)
            waiting[thread] += busy
            if number in late:
                now, waiting[thread] = _delay_clock(self.threads[thread], waiting[thread]), 0.0
                self.threads[thread] = self.open(now, late[number])
            if code == Code.HOST:
                continue
            if code == Code.JOIN:
                self.threads[target], waiting[target] = _delay_clock(self.threads[target], waiting[target]), 0.0
            now, waiting[thread] = _delay_clock(self.threads[thread], waiting[thread]), 0.0
            if code == Code.LAUNCH:
                start = self.latest(now, _delay_clock(self.streams[target], self.gap))
                end = self.open(start, opened[number]) if number in opened else start
                self.streams[target] = _delay_clock(end, lasting)
            else:
                now = self._control(code, now, target, event)
            self.threads[thread] = now
        self._list_clocks(waiting)
        if len(schedule.code) in ends:
            self._choose(ends[len(schedule.code)], before, int(schedule.thread[ends[len(schedule.code)].first]))

    def _control(self, code: int, now: Clock, target: int, event: int) -> Clock:
        if code == Code.JOIN:
            return self.latest(now, self.threads[target])
        if code == Code.STREAM_SYNCHRONIZE:
            return self.latest(now, self.streams[target])
        if code == Code.DEVICE_SYNCHRONIZE:
            return self.latest(now, *self.streams)
        if code == Code.EVENT_SYNCHRONIZE:
            return self.latest(now, self.events[target])
        if code == Code.EVENT_RECORD:
            self.events[event] = self.latest(now, self.streams[target])
        elif code == Code.STREAM_WAIT_EVENT:
            self.streams[target] = self.latest(self.streams[target], self.events[event])
        return now


def _delay_clock(clock: Clock, seconds: float) -> Clock:
    return {register: value + seconds for register, value in clock.items()}


def compile_simulation(
    schedule: Schedule,
    host: FloatArray,
    kernel: FloatArray,
    opened: Mapping[int, Slot],
    *,
    gap: float,
    late: Mapping[int, Slot] = MappingProxyType({}),
    skips: Sequence[Skip] = (),
) -> SimulationCode:
    """Two steps that run into each other. `host` and `kernel` are seconds per instruction; `opened` says which
    instructions launch kernels that last an open duration longer than that, `late` before which ones the host is busy
    for an open duration (its slot), and `skips`, none within another, what only some ranks run. No open duration is
    below 0."""
    compiler = _Compiler(schedule, gap)
    done = []
    for _ in range(2):
        compiler.run(schedule, host, kernel, opened, late, skips)
        done.append(compiler.latest(*compiler.threads, *compiler.streams))
        together = compiler.latest(*compiler.threads)
        compiler.threads = [together] * schedule.num_threads
    return SimulationCode(tuple(compiler.registers), done[0], done[1])
