"""What each instruction of a timeline belongs to, and the timeline with half the time for something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from traincast.simulator.critical import PathPart, Segment
from traincast.simulator.schedule import Code
from traincast.traces.link import Linked
from traincast.traces.replay.timeline import TimelineInstructions
from traincast.utils.arrays import FloatArray, IntArray, group_positions

HOST = "host"
"""What the path and the gains call all work of the host."""

BACKLOG = "launched before the trace"
"""What the path calls kernels whose launch was not recorded."""

GRAPH, LATE = "before graph nodes", "late start"
"""What the path calls the time for which a kernel that could have begun did not, in a graph and elsewhere."""

_LEAST_LATE = 2e-6  # seconds: less than this is part of the kernel


class Labels:
    """What each instruction belongs to."""

    def __init__(self, linked: Linked, instructions: TimelineInstructions) -> None:
        self.linked, self.instructions = linked, instructions
        launches = instructions.schedule.code == Code.LAUNCH
        self.family = np.full(len(instructions.row), "", dtype=object)
        self.family[launches] = linked.find_families(instructions.row[launches])
        self.family[launches & (instructions.point < 0)] = BACKLOG
        self.late = _describe_late_starts(linked, instructions)
        self.gap = instructions.gap_end >= 0
        called = np.where(instructions.point >= 0, linked.scope[instructions.point], -1)
        scope = np.where(self.gap, _find_main_scope(linked, instructions), called)
        names = np.array([*linked.trace.names, ""], dtype=object)
        self.op = names[np.where(scope >= 0, linked.events["name"][scope], len(names) - 1)]
        self.families = sorted({*self.family[launches], *self.late} - {BACKLOG, ""})
        self.ops = sorted({linked.get_name(row) for row in linked.scopes.tolist()})

    def describe_segment(self, rank: int, segment: Segment) -> Iterator[PathPart]:
        """A stretch of the path in words: a kernel that began late is two."""
        what, op, name = self._describe_instruction(segment.instruction, segment.where)
        begin, late = segment.start, str(self.late[segment.instruction])
        if segment.where == "device" and late and what != BACKLOG:
            kept = float(self.instructions.kept_seconds[segment.instruction])
            begin = min(max(segment.start, segment.end - segment.seconds + kept), segment.end)
            yield PathPart(rank, late, op, name, segment.start, begin)
        yield PathPart(rank, what, op, name, begin, segment.end)

    def _describe_instruction(self, instruction: int, where: str) -> tuple[str, str, str]:
        """(what, op, name) of an instruction on the path."""
        op = str(self.op[instruction])
        if self.family[instruction] == BACKLOG:
            return BACKLOG, BACKLOG, self.linked.get_name(int(self.instructions.row[instruction]))
        if where == "device":
            return str(self.family[instruction]), op, self.linked.get_name(int(self.instructions.row[instruction]))
        return HOST, op, op or "between ops"

    def halve_time(self, name: str) -> TimelineInstructions:
        """The instructions with half the time for a family, for an op (its kernels and its own host time), or for
        all of the host's work."""
        instructions = self.instructions
        host, kernels = instructions.host_seconds.copy(), instructions.kernel_seconds.copy()
        kept = instructions.kept_seconds.copy()
        if name == HOST:
            host *= 0.5
        elif name in self.families:
            kernels[self.family == name] *= 0.5
            kept[self.late == name] *= 0.5
        else:
            mine = (self.op == name) & ~self.gap
            kernels[mine] *= 0.5
            host[mine] *= 0.5
            host -= 0.5 * self._compute_seconds_inside(name)
        return replace(instructions, host_seconds=np.maximum(host, 0.0), kernel_seconds=kernels, kept_seconds=kept)

    def _compute_seconds_inside(self, name: str) -> FloatArray:
        """Seconds of each way to a call that the host spent inside of ops of this name."""
        linked, instructions = self.linked, self.instructions
        inside = np.zeros(len(instructions.row))
        named = linked.scopes[[linked.get_name(row) == name for row in linked.scopes.tolist()]]
        gaps = np.flatnonzero(self.gap)
        gaps_of = {thread: gaps[places] for thread, places in group_positions(instructions.schedule.thread[gaps])}
        for thread, places in group_positions(linked.thread[named]):
            rows = named[places]
            edges = np.stack([linked.events["start"][rows], linked.end[rows]], axis=1)
            spent = np.concatenate(([0], np.cumsum(edges[:, 1] - edges[:, 0])))
            at, value = edges.ravel(), np.stack([spent[:-1], spent[1:]], axis=1).ravel()
            mine = gaps_of.get(thread, gaps[:0])
            begin, end = (
                np.interp(moment[mine], at, value) for moment in (instructions.gap_begin, instructions.gap_end)
            )
            inside[mine] = 1e-9 * (end - begin)
        return np.minimum(inside, instructions.host_seconds)


def _describe_late_starts(linked: Linked, instructions: TimelineInstructions) -> npt.NDArray[np.object_]:
    """What the time is called for which each launch's kernel was kept; "" where that is next to nothing."""
    of_graph = (instructions.point >= 0) & linked.is_graph_launch[np.maximum(instructions.point, 0)]
    names = np.where(of_graph, GRAPH, LATE).astype(object)
    names[instructions.kept_seconds < _LEAST_LATE] = ""
    return names


def _find_main_scope(linked: Linked, instructions: TimelineInstructions) -> IntArray:
    """For each way to a call the top-level op that takes most of it, or -1 where the time between ops is longer."""
    main = np.full(len(instructions.row), -1, dtype=np.int64)
    gaps = np.flatnonzero(instructions.gap_end >= 0)
    for thread, places in group_positions(instructions.schedule.thread[gaps]):
        if thread not in linked.scope_spans:
            continue
        rows, mine = linked.scopes_by_thread[thread], gaps[places]
        begin, end = instructions.gap_begin[mine], instructions.gap_end[mine]
        main[mine] = np.append(rows, -1)[_find_longest_span(*linked.scope_spans[thread], begin, end)]
    return main


def _find_longest_span(starts: IntArray, ends: IntArray, begin: IntArray, end: IntArray) -> IntArray:
    """For each window the span that takes most of it, of equal ones the first; -1 where what no span covers is longer.
    Spans are disjoint and in order."""
    first = np.searchsorted(ends, begin, side="right")
    count = np.maximum(np.searchsorted(starts, end) - first, 0)
    longest = np.full(len(begin), -1, dtype=np.int64)
    some = np.flatnonzero(count)
    if not len(some):
        return longest
    first, count, begin, end = first[some], count[some], begin[some], end[some]
    heads = np.cumsum(count) - count  # where each window's spans begin among all pairs of window and span
    span = np.arange(count.sum()) + np.repeat(first - heads, count)
    spent = np.minimum(ends[span], np.repeat(end, count)) - np.maximum(starts[span], np.repeat(begin, count))
    most = np.maximum.reduceat(spent, heads)
    winner = np.minimum.reduceat(np.where(spent == np.repeat(most, count), span, len(starts)), heads)
    enough = most >= end - begin - np.add.reduceat(spent, heads)
    longest[some[enough]] = winner[enough]
    return longest
