"""The critical path of a replayed timeline over host threads and streams, and what faster parts of it would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traincast.errors import unknown
from traincast.replay.labels import HOST, Labels
from traincast.replay.steady import cycle, steady_path, steady_seconds, whole_walk
from traincast.replay.timeline import TimelineInstructions
from traincast.totals import totals
from traincast.traces.link import Linked
from traincast.walk.critical import PathPart, Segment, critical_path

SHOWN_OPS = 6
"""So many of the ops that take most of the path are tried at twice their speed: the whole table of a page."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PathReport:
    """The critical path of a rank's whole timeline.

    All else is said of the steps as they would go on (see `steady.py`): `steady` is their mean length in seconds,
    `by_what` and `by_op` what the path through them is made of, as shares of it, and `faster` what a step would save,
    as a share of itself, if that family, op or the host took half as long.
    """

    segments: tuple[PathPart, ...]
    by_what: dict[str, float]
    by_op: dict[str, float]
    faster: dict[str, float]
    steady: float

    def to_dict(self) -> dict[str, Any]:
        """Shares and gains, and the path itself in microseconds from the trace's first moment."""
        return {
            "share_by_what": self.by_what,
            "share_by_op": self.by_op,
            "twice_as_fast_saves": self.faster,
            "steady_step_ms": 1e3 * self.steady,
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
    labels = Labels(linked, instructions)
    segments = _in_words(rank, labels, critical_path([whole_walk(instructions)]))
    repeated = cycle(linked, instructions)
    settled = Labels(linked, repeated)
    by_what, by_op = _shares(_in_words(rank, settled, steady_path(repeated)) if linked.marked else segments)
    for name in twice:
        if name not in labels.families and name not in labels.ops and name != HOST:
            raise unknown("op or kernel family", name, [HOST, *labels.families, *labels.ops], "Name one of the trace.")
    ops = [op for op in by_op if op in labels.ops][:SHOWN_OPS]
    names = list(dict.fromkeys((*twice, HOST, *labels.families, *ops)))
    before, *after = steady_seconds(linked, [repeated, *(settled.halved(name) for name in names)]).tolist()
    gains = {name: 1.0 - seconds / before if before > 0 else 0.0 for name, seconds in zip(names, after, strict=True)}
    steps = len(linked.steps) if linked.marked else 1
    return PathReport(
        segments=segments, by_what=by_what, by_op=by_op, faster=by_gain(gains, twice), steady=before / steps
    )


def _in_words(rank: int, labels: Labels, path: Sequence[Segment]) -> tuple[PathPart, ...]:
    return tuple(part for segment in path for part in labels.parts(rank, segment))


def _shares(segments: Sequence[PathPart]) -> tuple[dict[str, float], dict[str, float]]:
    """What each kind and each op has of the path, as shares of it."""
    whole = max(sum(segment.seconds for segment in segments), 1e-12)
    by_what = totals((segment.what, segment.seconds / whole) for segment in segments)
    return by_what, totals((segment.op, segment.seconds / whole) for segment in segments)
