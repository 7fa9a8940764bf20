"""The critical path of a replayed timeline over host threads and streams, and what faster parts of it would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traincast.errors import unknown
from traincast.replay.labels import HOST, Labels
from traincast.replay.steps import rewalk, step_edges
from traincast.replay.timeline import TimelineInstructions
from traincast.totals import totals
from traincast.traces.link import Linked
from traincast.walk.clocks import RankTimes
from traincast.walk.crew import Crew
from traincast.walk.critical import PathPart, critical_path
from traincast.walk.ranks import Meetings, walk_ranks

SHOWN_OPS = 6
"""So many of the ops that take most of the path are tried at twice their speed: the whole table of a page."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PathReport:
    """The critical path of a rank's whole timeline. `by_what` and `by_op` are shares of the steps' time; `faster` is
    what a step would save, as a share of itself, if that family, op or the host took half as long."""

    segments: tuple[PathPart, ...]
    by_what: dict[str, float]
    by_op: dict[str, float]
    faster: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Shares and gains, and the path itself in microseconds from the trace's first moment."""
        return {
            "share_by_what": self.by_what,
            "share_by_op": self.by_op,
            "twice_as_fast_saves": self.faster,
            "segments": [segment_dict(part) for part in self.segments],
        }


def segment_dict(part: PathPart) -> dict[str, Any]:
    """A stretch of a path in microseconds, without its rank."""
    return {
        "what": part.what, "op": part.op, "name": part.name,
        "start_us": round(1e6 * part.start, 3), "length_us": round(1e6 * part.seconds, 3),
    }  # fmt: skip


def by_gain(gains: dict[str, float], asked_for: Sequence[str]) -> dict[str, float]:
    """Gains with those that were asked for first, each part with the largest first."""
    return dict(sorted(gains.items(), key=lambda item: (item[0] not in asked_for, -item[1])))


def path_report(rank: int, linked: Linked, instructions: TimelineInstructions, twice: Sequence[str] = ()) -> PathReport:
    """The path of a timeline, and the gains of what is on it and of all that is named in `twice`."""
    crew = Crew(instructions.schedule, instructions.host_seconds[None], instructions.kernel_seconds[None])
    walks = walk_ranks([crew], Meetings.none())
    labels = Labels(linked, instructions)
    segments = tuple(PathPart(rank, *labels.of(s.instruction, s.where), s.start, s.end) for s in critical_path(walks))
    by_what, by_op = _shares(linked, instructions, walks[0].times(0), segments)
    for name in twice:
        if name not in labels.families and name not in labels.ops and name != HOST:
            raise unknown("op or kernel family", name, [HOST, *labels.families, *labels.ops], "Name one of the trace.")
    ops = [op for op in by_op if op in labels.ops][:SHOWN_OPS]
    before = max(float(rewalk(linked, instructions).walked.sum()), 1e-12)
    gains = {
        name: 1.0 - float(rewalk(linked, labels.halved(name)).walked.sum()) / before
        for name in dict.fromkeys((*twice, HOST, *labels.families, *ops))
    }
    return PathReport(segments=segments, by_what=by_what, by_op=by_op, faster=by_gain(gains, twice))


def _shares(
    linked: Linked, instructions: TimelineInstructions, times: RankTimes, segments: Sequence[PathPart]
) -> tuple[dict[str, float], dict[str, float]]:
    """Path seconds between the first and the last marker by what and by op, as shares of that time."""
    if linked.marked:
        edges = step_edges(instructions, times)
        first, last = float(edges[0]), float(edges[-1])
    else:
        first, last = 0.0, max((segment.end for segment in segments), default=0.0)
    inside = [(s, (min(s.end, last) - max(s.start, first)) / max(last - first, 1e-12)) for s in segments]
    inside = [(segment, share) for segment, share in inside if share > 0]
    by_what = totals((segment.what, share) for segment, share in inside)
    return by_what, totals((segment.op, share) for segment, share in inside)
