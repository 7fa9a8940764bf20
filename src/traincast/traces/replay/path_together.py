"""The critical path of a traced run over all of its ranks, and what faster parts of it would bring.

Within a rank the path is that of `walk/critical.py`; at a collective it goes over to the rank that came last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from traincast.simulator.critical import PathPart, find_critical_path
from traincast.traces.classify import COMMUNICATION
from traincast.traces.link import Linked
from traincast.traces.replay.labels import HOST, Labels
from traincast.traces.replay.path import SHOWN_OPS, convert_segment, sort_by_gain
from traincast.traces.replay.together import RanksSchedule, RanksSimulation, simulate_together
from traincast.utils.arrays import FloatArray
from traincast.utils.totals import sum_by_key

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
        for segment in find_critical_path(simulated.walks, simulated.schedule.meetings)
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
        return shorter.replace_seconds(schedule.meetings.seconds * self._scale_transfers(name))

    def _scale_transfers(self, name: str) -> FloatArray:
        """The factor on each collective's transfer: it is faster if all members call it under the op that is."""
        m = self.schedule.meetings
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
