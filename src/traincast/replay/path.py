"""The critical path of a replayed timeline over host threads and streams, and what faster parts of it would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traincast.arrays import FloatArray, IntArray
from traincast.errors import unknown
from traincast.replay.timeline import TimelineInstructions, rewalk, step_edges
from traincast.traces.classify import kernel_family
from traincast.traces.link import Linked
from traincast.walk.clocks import RankTimes
from traincast.walk.critical import critical_path
from traincast.walk.ranks import Crew, Meetings, walk_ranks
from traincast.walk.schedule import Code

HOST = "host"
BACKLOG = "launched before the trace"
_SHOWN_OPS = 6


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A stretch of the path: seconds on the walk's clock, "host" or a kernel family, and the top-level op ("")."""

    what: str
    op: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, eq=False, kw_only=True)
class PathReport:
    """The critical path of the whole timeline. `by_what` and `by_op` are shares of the steps' time; `faster` is what a
    step would save, as a share of itself, if that family, op or the host took half as long."""

    segments: tuple[PathSegment, ...]
    by_what: dict[str, float]
    by_op: dict[str, float]
    faster: dict[str, float]


def path_report(linked: Linked, instructions: TimelineInstructions, twice: Sequence[str] = ()) -> PathReport:
    """The path of a timeline, and the gains of what is on it and of all that is named in `twice`."""
    crew = Crew(instructions.schedule, instructions.host_seconds[None], instructions.kernel_seconds[None])
    walks = walk_ranks([crew], Meetings.none())
    times = walks[0].times(0)
    labels = Labels(linked, instructions)
    segments = tuple(PathSegment(*labels.of(s.instruction, s.where), s.start, s.end) for s in critical_path(walks))
    by_what, by_op = _shares(linked, instructions, times, segments)
    for name in twice:
        if name not in labels.families and name not in labels.ops and name != HOST:
            raise unknown("op or kernel family", name, [HOST, *labels.families, *labels.ops], "Name one of the trace.")
    ops = [op for op in by_op if op in labels.ops][:_SHOWN_OPS]
    names = dict.fromkeys((*twice, HOST, *labels.families, *ops))
    before = [step.walked for step in rewalk(linked, instructions).steps]
    gains = {}
    for name in names:
        after = [step.walked for step in rewalk(linked, labels.halved(name)).steps]
        gains[name] = 1.0 - float(np.sum(after)) / max(float(np.sum(before)), 1e-12)
    faster = dict(sorted(gains.items(), key=lambda item: (item[0] not in twice, -item[1])))
    return PathReport(segments=segments, by_what=by_what, by_op=by_op, faster=faster)


class Labels:
    """What each instruction belongs to."""

    def __init__(self, linked: Linked, instructions: TimelineInstructions) -> None:
        self.linked, self.instructions = linked, instructions
        launches = instructions.schedule.code == Code.LAUNCH
        family = np.array([kernel_family(name) for name in linked.trace.names], dtype=object)
        self.family = np.full(len(instructions.row), "", dtype=object)
        self.family[launches] = family[linked.events["name"][instructions.row[launches]]]
        self.family[launches & (instructions.point < 0)] = BACKLOG
        self.gap = instructions.gap_end >= 0
        called = np.where(instructions.point >= 0, linked.scope[instructions.point], -1)
        scope = np.where(self.gap, _main_scope(linked, instructions), called)
        names = np.array([*linked.trace.names, ""], dtype=object)
        self.op = names[np.where(scope >= 0, linked.events["name"][scope], len(names) - 1)]
        self.families = sorted(set(self.family[launches]) - {BACKLOG})
        self.ops = sorted({linked.name(row) for row in linked.scopes.tolist()})

    def of(self, instruction: int, where: str) -> tuple[str, str, str]:
        """(what, op, name) of an instruction on the path."""
        op = str(self.op[instruction])
        if self.family[instruction] == BACKLOG:
            return BACKLOG, BACKLOG, self.linked.name(int(self.instructions.row[instruction]))
        if where == "device":
            return str(self.family[instruction]), op, self.linked.name(int(self.instructions.row[instruction]))
        return HOST, op, op or "between ops"

    def halved(self, name: str) -> TimelineInstructions:
        """The instructions with half the time for a family, for an op (its kernels and its own host time), or for
        all of the host's work."""
        instructions = self.instructions
        host, kernels = instructions.host_seconds.copy(), instructions.kernel_seconds.copy()
        if name == HOST:
            host *= 0.5
        elif name in self.families:
            kernels[self.family == name] *= 0.5
        else:
            mine = (self.op == name) & ~self.gap
            kernels[mine] *= 0.5
            host[mine] *= 0.5
            host -= 0.5 * self._inside(name)
        return replace(instructions, host_seconds=np.maximum(host, 0.0), kernel_seconds=kernels)

    def _inside(self, name: str) -> FloatArray:
        """Seconds of each way to a call that the host spent inside of ops of this name."""
        linked, instructions = self.linked, self.instructions
        inside = np.zeros(len(instructions.row))
        named = linked.scopes[[linked.name(row) == name for row in linked.scopes.tolist()]]
        for thread in np.unique(linked.thread[named]):
            rows = named[linked.thread[named] == thread]
            edges = np.stack([linked.events["start"][rows], linked.end[rows]], axis=1)
            spent = np.concatenate(([0], np.cumsum(edges[:, 1] - edges[:, 0])))
            at, value = edges.ravel(), np.stack([spent[:-1], spent[1:]], axis=1).ravel()
            mine = self.gap & (instructions.schedule.thread == thread)
            begin, end = (
                np.interp(moment[mine], at, value) for moment in (instructions.gap_begin, instructions.gap_end)
            )
            inside[mine] = 1e-9 * (end - begin)
        return np.minimum(inside, instructions.host_seconds)


def _main_scope(linked: Linked, instructions: TimelineInstructions) -> IntArray:
    """For each way to a call the top-level op that takes most of it, or -1 where the time between ops is longer."""
    main = np.full(len(instructions.row), -1, dtype=np.int64)
    threads = linked.thread[linked.scopes]
    for thread in np.unique(threads):
        rows = linked.scopes[threads == thread]
        starts, ends = linked.events["start"][rows], linked.end[rows]
        for i in np.flatnonzero((instructions.gap_end >= 0) & (instructions.schedule.thread == thread)).tolist():
            begin, end = int(instructions.gap_begin[i]), int(instructions.gap_end[i])
            some = slice(int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(starts, end)))
            spent = np.minimum(ends[some], end) - np.maximum(starts[some], begin)
            if len(spent) and spent.max() >= end - begin - spent.sum():
                main[i] = rows[some][int(np.argmax(spent))]
    return main


def _shares(
    linked: Linked, instructions: TimelineInstructions, times: RankTimes, segments: Sequence[PathSegment]
) -> tuple[dict[str, float], dict[str, float]]:
    """Path seconds between the first and the last marker by what and by op, as shares of that time."""
    if linked.marked:
        edges = step_edges(instructions, times)
        first, last = float(edges[0]), float(edges[-1])
    else:
        first, last = 0.0, max((segment.end for segment in segments), default=0.0)
    by_what: dict[str, float] = {}
    by_op: dict[str, float] = {}
    for segment in segments:
        seconds = min(segment.end, last) - max(segment.start, first)
        if seconds > 0:
            share = seconds / max(last - first, 1e-12)
            by_what[segment.what] = by_what.get(segment.what, 0.0) + share
            by_op[segment.op] = by_op.get(segment.op, 0.0) + share
    return _largest_first(by_what), _largest_first(by_op)


def _largest_first(shares: dict[str, float]) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
