"""The host time of a timeline cut into the five overheads, and what a pooled host profile says in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from traincast.costs.host.profile import AFTER, ALONE, BEFORE, BETWEEN, HostProfile, get_current_name, get_issuer
from traincast.simulator.schedule import Code
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.overheads.extraction import (
    LONGEST_GAP,
    ProfilerCost,
    classify_runtime_call,
    compare_with_usual_gap,
    estimate_profiler_cost,
)
from traincast.traces.overheads.extraction import TYPES as OVERHEAD_TYPES
from traincast.traces.replay.timeline import TimelineInstructions
from traincast.utils.arrays import FloatArray, IntArray

# what no profile of ops knows: reading the next batch takes as long as the user's loader does, and code that a compiler
# made from the user's program as long as that code is
_KEPT = re.compile(r"enumerate\(DataLoader\)|CompiledFunction|Torch-Compiled Region|CompiledFxGraph|## Call CompiledFx")
KEPT = "kept"
"""Host time of the program's own, which no profile knows."""

SET_UP = "set-up"
"""Host time inside of ops and calls that no overhead explains: a context is made, code is loaded, memory is allocated,
a library begins its work, or something stalls."""

TYPES = (*OVERHEAD_TYPES, KEPT, SET_UP)
# seconds, and times what the profile says: overheads of ops and calls are tens of microseconds, on slow hosts too
_NO_OVERHEAD, _TIMES = 1e-3, 10.0


@dataclass(frozen=True, slots=True)
class HostSpan:
    """A stretch of one instruction's host time: its overhead type, its op, and its two lengths in seconds."""

    instruction: int
    kind: str
    op: str
    measured: float
    pooled: float


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedHost:
    """Host seconds of every instruction by overhead type, as measured and as pooled."""

    pieces: tuple[HostSpan, ...]
    size: int

    def replace_measured(self, host_seconds: FloatArray, *kinds: str) -> FloatArray:
        """Host seconds with these types pooled instead of measured."""
        change = np.zeros(self.size)
        for block in self.pieces:
            if block.kind in kinds:
                change[block.instruction] += block.pooled - block.measured
        return np.maximum(host_seconds + change, 0.0)

    def as_measured(self) -> TracedHost:
        """The same with the measured lengths in place of the pooled ones."""
        return replace(self, pieces=tuple(replace(block, pooled=block.measured) for block in self.pieces))

    def sum_by_op(self) -> dict[tuple[str, str], tuple[float, float]]:
        """(measured, pooled) seconds by (type, op) over the whole trace, the largest differences first."""
        totals: dict[tuple[str, str], tuple[float, float]] = {}
        for block in self.pieces:
            measured, pooled = totals.get((block.kind, block.op), (0.0, 0.0))
            totals[block.kind, block.op] = (measured + block.measured, pooled + block.pooled)
        return dict(sorted(totals.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def pool_host(linked: Linked, instructions: TimelineInstructions, profile: HostProfile) -> TracedHost:
    """Every host instruction under a profile. What recording cost is put back: the measured step contains it."""
    cutter = _HostSplitter(linked, instructions, profile, estimate_profiler_cost(linked))
    cutter.split_all()
    return TracedHost(pieces=tuple(cutter.pieces), size=len(instructions.row))


class _HostSplitter:
    def __init__(
        self, linked: Linked, instructions: TimelineInstructions, profile: HostProfile, cost: ProfilerCost
    ) -> None:
        self.linked, self.instructions, self.profile, self.cost = linked, instructions, profile, cost
        self.pieces: list[HostSpan] = []
        self.launched: set[int] = set()
        self.scopes = linked.scopes_by_thread
        self.next = dict.fromkeys(self.scopes, 0)
        self.records = self._record_starts()
        names = list(dict.fromkeys(linked.get_name(row) for row in linked.scopes.tolist()))
        self.parts: Mapping[str, FloatArray] = dict(
            zip(names, profile.scope_seconds([get_current_name(name) for name in names]), strict=True)
        )

    def _record_starts(self) -> dict[int, tuple[IntArray, FloatArray]]:
        """For each thread when its recordings inside of scopes began, and their summed cost up to each."""
        linked, kinds = self.linked, self.linked.events["kind"]
        under = linked.scope >= 0
        inside = under & (linked.scope != np.arange(len(linked.scope)))
        ops = inside & ((kinds == Kind.OP) | (kinds == Kind.ANNOTATION))
        stacks = under & (linked.events["frames"] > 0)  # a scope's own stack too is recorded inside of it
        calls = inside & (kinds == Kind.RUNTIME) & ~linked.is_launch & ~linked.is_synchronise
        records = {}
        for thread in self.scopes:
            rows = np.flatnonzero((ops | calls | stacks) & (linked.thread == thread))
            rows = rows[np.argsort(linked.events["start"][rows], kind="stable")]
            cost = self.cost.op * ops[rows] + self.cost.call * calls[rows]
            cost = cost + self.cost.frame * linked.events["frames"][rows]
            records[thread] = (linked.events["start"][rows], np.concatenate(([0.0], np.cumsum(cost))))
        return records

    def split_all(self) -> None:
        instructions = self.instructions
        charged: set[int] = set()
        for i in range(len(instructions.row)):
            point, thread = int(instructions.point[i]), int(instructions.schedule.thread[i])
            if instructions.gap_end[i] >= 0:
                self._split_gap(i, thread, point, int(instructions.gap_begin[i]), int(instructions.gap_end[i]))
            elif point >= 0 and instructions.schedule.code[i] in (Code.LAUNCH, Code.HOST):
                self._split_call(i, point, first=point not in charged)
                charged.add(point)

    def _split_call(self, i: int, point: int, *, first: bool) -> None:
        name, measured = self.linked.get_name(point), float(self.instructions.host_seconds[i])
        if self.linked.is_graph_launch[point]:  # takes the longer the more nodes the graph has
            if measured:
                self.pieces.append(HostSpan(i, KEPT, name, measured, measured))
            return
        kind = classify_runtime_call(name)
        seconds = self.profile.t4.get(kind, self.profile.t4["launch"]) + 1e-9 * self.cost.call if first else 0.0
        self._add_span(i, "T4", name, measured, seconds)

    def _split_gap(self, i: int, thread: int, point: int, begin: int, end: int) -> None:
        """The way from a thread's last call to this one, through the ends and beginnings of scopes."""
        inside = int(self.linked.scope[point]) if point >= 0 else -1
        launches = point >= 0 and bool(self.linked.is_launch[point]) and not self.linked.is_synchronise[point]
        starts, ends = self.linked.events["start"], self.linked.end
        rows, at = self.scopes.get(thread, np.empty(0, dtype=np.int64)), begin
        place = self.next.get(thread, 0)
        while place < len(rows) and starts[rows[place]] < end:
            scope = int(rows[place])
            name, first, last = self.linked.get_name(scope), int(starts[scope]), int(ends[scope])
            if last <= begin and last < end:  # done while the thread had to wait for another one
                place += 1
                continue
            if first >= at:
                gap = self._find_gap(get_issuer(name, main=thread == 0), at, first)
                self._add_time_between_ops(i, first - at, gap + 1e-9 * self.cost.op)
            at = max(at, first)
            covered = max(min(last, end) - at, 0)
            at = max(at, min(last, end))
            if last > end or scope == inside:
                if launches and scope == inside:
                    again = scope in self.launched
                    self._add_scope_part(
                        i, "T5" if again else "T2", name, covered, BETWEEN if again else BEFORE, thread, end
                    )
                    self.launched.add(scope)
                else:
                    self._add_overhead(i, "T5" if scope in self.launched else "T2", name, covered, 0.0)
                break
            ended = scope in self.launched
            self._add_scope_part(i, "T3" if ended else "alone", name, covered, AFTER if ended else ALONE, thread, last)
            place += 1
        else:
            self._to_end(i, max(end - at, 0), outside=point >= 0 and inside < 0)
        self.next[thread] = place

    def _find_gap(self, issuer: str, begin: int, end: int) -> float:
        """The profile's time between two ops; where Python's tracer ran it says how much code lies between them."""
        return self.profile.t1[issuer] * compare_with_usual_gap(self.linked, issuer, begin, end)

    def _to_end(self, i: int, measured_ns: int, *, outside: bool) -> None:
        """The way from the last op to a step's edge, or to a call that no op made: a program's own launches."""
        if outside:
            self._add_overhead(i, KEPT, "", measured_ns, 1e-9 * measured_ns)
        else:
            self._add_time_between_ops(i, measured_ns, 0.0)

    def _add_time_between_ops(self, i: int, measured_ns: int, pooled: float) -> None:
        """Time between two ops; profiles hold the mean of short ones, long ones are work of the user's own."""
        long = 1e-9 * measured_ns > LONGEST_GAP
        self._add_overhead(i, KEPT if long else "T1", "", measured_ns, 1e-9 * measured_ns if long else pooled)

    def _add_scope_part(self, i: int, kind: str, name: str, covered: int, part: int, thread: int, end: int) -> None:
        """One part of a scope's host time, with the cost of what was recorded during it."""
        if _KEPT.match(name):
            self._add_overhead(i, KEPT, name, covered, 1e-9 * covered)
            return
        seconds = float(self.parts[name][part])
        starts, summed = self.records[thread]
        low, high = np.searchsorted(starts, [end - covered, end])
        self._add_overhead(i, kind, name, covered, seconds + 1e-9 * float(summed[high] - summed[low]))

    def _add_overhead(self, i: int, kind: str, op: str, measured_ns: int, pooled: float) -> None:
        if measured_ns or pooled:
            self._add_span(i, kind, op, 1e-9 * measured_ns, pooled)

    def _add_span(self, i: int, kind: str, op: str, measured: float, pooled: float) -> None:
        """A stretch of host time under a profile; one that is far longer than any overhead stays as it was."""
        if measured > _NO_OVERHEAD and measured > _TIMES * pooled and kind != KEPT:
            kind, pooled = SET_UP, measured
        self.pieces.append(HostSpan(i, kind, op, measured, pooled))
