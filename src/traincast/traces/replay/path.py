"""The critical path of replayed timelines, of one rank and over all of them, and what faster parts of it would bring.

Within a rank it leads over host threads and streams; at a collective it goes over to the rank that came last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from traincast.simulator.schedule import Code
from traincast.simulator.timeline import PathPart, Segment, find_critical_path
from traincast.traces.classify import COMMUNICATION
from traincast.traces.link import Linked
from traincast.traces.replay.steps import compute_steady_seconds, find_steady_path, select_marked_steps, simulate_once
from traincast.traces.replay.timeline import TimelineInstructions
from traincast.traces.replay.together import RanksSchedule, RanksSimulation, simulate_together
from traincast.utils.arrays import FloatArray, IntArray, group_positions
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.metrics import sum_by_key

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


SHOWN_OPS = 6
"""This many of the ops that take most of the path are tried at twice their speed: the whole table of a page."""

_TAKEN_OVER = 0.25  # gain for each share of the path; half of the time would be 0.5, had the step but one path


@dataclass(frozen=True, eq=False, kw_only=True)
class PathReport:
    """The critical path of a rank's whole timeline.

    All else is said of the steps as they would go on (see `steady.py`): `steady` is their mean length in seconds,
    `by_what` and `by_op` what the path through them is made of, as shares of it, and `faster` what a step would save,
    as a share of itself, if that family, op or the host took half as long. `by_what` begins with what saves most.

    Where half the time for what has most of the path gains less than half of what its share promises, another path
    takes over then: `after` is what that one is made of, else empty. `critical` is the share of a step for which each
    kind is on all paths at once, as far as its half goes: twice what that saves. With one path that is its share.
    """

    segments: tuple[PathPart, ...]
    by_what: dict[str, float]
    by_op: dict[str, float]
    faster: dict[str, float]
    steady: float
    after: dict[str, float]
    kinds: frozenset[str]

    @property
    def most(self) -> str:
        """What has most of the path."""
        return max(self.by_what, key=lambda what: self.by_what[what], default="")

    @property
    def critical(self) -> dict[str, float]:
        """For how much of a step each kind is on all paths at once, most first; see the class."""
        return {what: 2.0 * gain for what, gain in self.faster.items() if what in self.kinds}

    def to_dict(self) -> dict[str, Any]:
        """Shares and gains, and the path itself in microseconds from the trace's first moment."""
        return {
            "share_by_what": self.by_what,
            "share_by_op": self.by_op,
            "twice_as_fast_saves": self.faster,
            "steady_step_ms": 1e3 * self.steady,
            "share_by_what_after": self.after,
            "critical_on_all_paths": self.critical,
            "segments": [convert_segment(part) for part in self.segments],
        }


def convert_segment(part: PathPart) -> dict[str, Any]:
    """A stretch of a path in microseconds, without its rank."""
    return {
        "what": part.what, "op": part.op, "name": part.name,
        "start_us": round(1e6 * part.start, 3), "length_us": round(1e6 * part.seconds, 3),
    }  # fmt: skip


def sort_by_gain(gains: dict[str, float], asked_for: Sequence[str], shares: Mapping[str, float]) -> dict[str, float]:
    """Gains with those that were asked for first, each part with the largest first; of equal ones what has more of the
    path."""

    def place(name: str) -> tuple[bool, float, float]:
        return name not in asked_for, -gains[name], -shares.get(name, 0.0)

    return {name: gains[name] for name in sorted(gains, key=place)}


def make_path_report(
    rank: int, linked: Linked, instructions: TimelineInstructions, twice: Sequence[str] = ()
) -> PathReport:
    """The path of a timeline, and the gains of what is on it and of all that is named in `twice`; nothing where no
    launch was recorded, since then nobody knows what waited for what."""
    if not linked.launched:
        return _make_empty_report(linked, twice)
    labels = Labels(linked, instructions)
    segments = _describe_path(rank, labels, find_critical_path([simulate_once(instructions)]))
    repeated = select_marked_steps(linked, instructions)
    settled = Labels(linked, repeated)
    shown = _share_path(rank, linked, settled, repeated)
    for name in twice:
        if name not in labels.families and name not in labels.ops and name != HOST:
            raise make_unknown_error(
                "op or kernel family", name, [HOST, *labels.families, *labels.ops], "Name one of the trace."
            )
    ops = [op for op in shown.by_op if op in labels.ops][:SHOWN_OPS]
    names = list(dict.fromkeys((*twice, HOST, *labels.families, *ops)))
    variants = chain((repeated,), map(settled.halve_time, names))
    before, *after = compute_steady_seconds(linked, variants).tolist()
    gains = {name: 1.0 - seconds / before if before > 0 else 0.0 for name, seconds in zip(names, after, strict=True)}
    first, share = next(iter(shown.by_what.items()), ("", 0.0))
    taken_over = gains.get(first, share) < _TAKEN_OVER * share
    ranked = sorted(shown.by_what, key=lambda what: (-gains.get(what, 0.0), -shown.by_what[what]))
    steps = len(linked.steps) if linked.marked else 1
    return PathReport(
        segments=segments,
        by_what={what: shown.by_what[what] for what in ranked},
        by_op=shown.by_op,
        faster=sort_by_gain(gains, twice, shown.by_what),
        steady=before / steps,
        after=_share_path(rank, linked, settled, settled.halve_time(first)).by_what if taken_over else {},
        kinds=frozenset((HOST, *labels.families)),
    )


def _make_empty_report(linked: Linked, twice: Sequence[str]) -> PathReport:
    if twice:
        raise TraincastError(f"'{linked.trace.path}' has no launches of its kernels: what-ifs ({twice[0]}) need them")
    steady = sum(step.seconds for step in linked.steps) / len(linked.steps)
    return PathReport(segments=(), by_what={}, by_op={}, faster={}, steady=steady, after={}, kinds=frozenset())


def _describe_path(rank: int, labels: Labels, path: Sequence[Segment]) -> tuple[PathPart, ...]:
    return tuple(part for segment in path for part in labels.describe_segment(rank, segment))


@dataclass(frozen=True)
class _Shares:
    """What each kind and each op has of a path, as shares of it."""

    by_what: dict[str, float]
    by_op: dict[str, float]


def _share_path(rank: int, linked: Linked, labels: Labels, instructions: TimelineInstructions) -> _Shares:
    """What the path through these instructions is made of: those of `labels`, with whatever lengths."""
    path = find_steady_path(instructions) if linked.marked else find_critical_path([simulate_once(instructions)])
    segments = _describe_path(rank, labels, path)
    return _Shares(_compute_shares(segments, lambda s: s.what), _compute_shares(segments, lambda s: s.op))


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksPath:
    """The path over ranks. Shares are of the path's own length. `skew` is how much later than the first rank the one
    began on which the path begins, in seconds.

    `faster` is what the run, from the begin of its first rank to the end of its last, would save as a share of itself
    if that family, op, rank ("rank 7") or the host of all ranks took half as long."""

    segments: tuple[PathPart, ...]
    skew: float
    by_rank: dict[int, float]
    by_what: dict[str, float]
    by_place: dict[tuple[int, str], float]
    faster: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Shares and gains, and the path itself in microseconds on the common clock."""
        return {
            "skew_ms": 1e3 * self.skew,
            "share_by_rank": {str(rank): share for rank, share in self.by_rank.items()},
            "share_by_what": self.by_what,
            "share_by_rank_and_op": [
                {"rank": rank, "op": op, "share": share} for (rank, op), share in self.by_place.items()
            ],
            "twice_as_fast_saves": self.faster,
            "segments": [{"rank": part.rank, **convert_segment(part)} for part in self.segments],
        }


def find_ranks_path(
    numbers: Sequence[int], ranks: Sequence[Linked], simulated: RanksSimulation, twice: Sequence[str] = ()
) -> RanksPath:
    """The path of a run whose ranks were simulated together; `numbers` are the ranks' own."""
    labels = [Labels(linked, timeline) for linked, timeline in zip(ranks, simulated.schedule.timelines, strict=True)]
    segments = tuple(
        part
        for segment in find_critical_path(simulated.simulations, simulated.schedule.collectives)
        for part in labels[segment.group].describe_segment(numbers[segment.group], segment)
    )
    by_rank = _compute_shares(segments, lambda s: s.rank)
    by_what = _compute_shares(segments, lambda s: s.what)
    ops = [op for op in _compute_shares(segments, lambda s: s.op) if any(op in rank.ops for rank in labels)][:SHOWN_OPS]
    families = [what for what in by_what if any(what in rank.families for rank in labels)]
    halved = _HalvedSchedule(simulated.schedule, labels, {f"rank {rank}": index for index, rank in enumerate(numbers)})
    gains = {
        name: 1.0 - simulate_together(halved.halve_time(name)).seconds / simulated.seconds
        for name in dict.fromkeys((*twice, HOST, *families, *ops, *(f"rank {rank}" for rank in by_rank)))
    }
    return RanksPath(
        segments=segments,
        skew=segments[0].start if segments else 0.0,
        by_rank=by_rank,
        by_what=by_what,
        by_place=_compute_shares(segments, lambda s: (s.rank, s.op)),
        faster=sort_by_gain(gains, twice, by_what),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _HalvedSchedule:
    """Instructions of all ranks with half the time for something."""

    schedule: RanksSchedule
    labels: list[Labels]
    rank_names: dict[str, int]

    def halve_time(self, name: str) -> RanksSchedule:
        """Half the time for a rank, a family, an op or all of the host's work."""
        schedule = self.schedule
        timelines = list(schedule.timelines)
        if name in self.rank_names:
            index = self.rank_names[name]
            slow = timelines[index]
            timelines[index] = replace(
                slow, host_seconds=0.5 * slow.host_seconds, kernel_seconds=0.5 * slow.kernel_seconds
            )  # its collectives' transfers are not its own
            return replace(schedule, timelines=tuple(timelines))
        for index, labels in enumerate(self.labels):
            if name == HOST or name in labels.families or name in labels.ops:
                timelines[index] = labels.halve_time(name)
        shorter = replace(schedule, timelines=tuple(timelines))
        return shorter.replace_seconds(schedule.collectives.seconds * self._scale_transfers(name))

    def _scale_transfers(self, name: str) -> FloatArray:
        """The factor on each collective's transfer: it is faster if all members call it under the op that is."""
        m = self.schedule.collectives
        if name == COMMUNICATION:
            return np.full(len(m.seconds), 0.5)
        other = np.zeros(len(m.seconds), dtype=np.bool_)
        for collective, rank, instruction in zip(
            m.collective.tolist(), m.group.tolist(), m.instruction.tolist(), strict=True
        ):
            other[collective] |= self.labels[rank].op[instruction] != name
        return np.where(other, 1.0, 0.5)


def _compute_shares(segments: Sequence[PathPart], key: Callable[[PathPart], K]) -> dict[K, float]:
    whole = max(sum(s.seconds for s in segments), 1e-12)
    return sum_by_key((key(s), s.seconds / whole) for s in segments)
