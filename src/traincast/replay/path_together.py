"""The critical path of a traced run over all of its ranks, and what faster parts of it would bring.

Within a rank the path is that of `critical.py`; at a collective it goes over to the rank that came last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from traincast.arrays import FloatArray
from traincast.replay.path import HOST, Labels
from traincast.replay.together import RanksSchedule, RanksWalk, walk_together
from traincast.traces.classify import COMMUNICATION
from traincast.traces.link import Linked
from traincast.walk.critical import critical_path

K = TypeVar("K", bound=Hashable)
_SHOWN_OPS = 6


@dataclass(frozen=True, slots=True)
class RankSegment:
    """A stretch of the path on rank number `rank`: seconds on the common clock, "host" or a kernel family, the
    top-level op ("") and a name."""

    rank: int
    what: str
    op: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, eq=False, kw_only=True)
class RanksPath:
    """The path over ranks. Shares are of the path's own length. `skew` is how much later than the first rank the one
    began on which the path begins, in seconds.

    `faster` is what the run, from the begin of its first rank to the end of its last, would save as a share of itself
    if that family, op, rank ("rank 7") or the host of all ranks took half as long."""

    segments: tuple[RankSegment, ...]
    skew: float
    by_rank: dict[int, float]
    by_what: dict[str, float]
    by_place: dict[tuple[int, str], float]
    faster: dict[str, float]


def ranks_path(
    numbers: Sequence[int], ranks: Sequence[Linked], walked: RanksWalk, twice: Sequence[str] = ()
) -> RanksPath:
    """The path of a run whose ranks were walked together; `numbers` are the ranks' own."""
    labels = [Labels(linked, each) for linked, each in zip(ranks, walked.schedule.instructions, strict=True)]
    segments = tuple(
        RankSegment(numbers[s.crew], *labels[s.crew].of(s.instruction, s.where), s.start, s.end)
        for s in critical_path(walked.walks, walked.meetings)
    )
    by_rank = _shares(segments, lambda s: s.rank)
    by_what = _shares(segments, lambda s: s.what)
    ops = [op for op in _shares(segments, lambda s: s.op) if any(op in own.ops for own in labels)][:_SHOWN_OPS]
    families = [what for what in by_what if any(what in own.families for own in labels)]
    halved = _Halved(walked.schedule, labels, {f"rank {rank}": index for index, rank in enumerate(numbers)})
    before, gains = _length(walked), {}
    for name in dict.fromkeys((*twice, HOST, *families, *ops, *(f"rank {rank}" for rank in by_rank))):
        gains[name] = 1.0 - _length(walk_together(halved.named(name))) / before
    return RanksPath(
        segments=segments,
        skew=segments[0].start if segments else 0.0,
        by_rank=by_rank,
        by_what=by_what,
        by_place=_shares(segments, lambda s: (s.rank, s.op)),
        faster=dict(sorted(gains.items(), key=lambda item: (item[0] not in twice, -item[1]))),
    )


def _length(walked: RanksWalk) -> float:
    """Seconds from the begin of the first rank to the end of the last."""
    return max(float(each.latest().max()) for each in walked.walks) - float(walked.schedule.begin.min())


@dataclass(frozen=True, eq=False, slots=True)
class _Halved:
    """Instructions of all ranks with half the time for something."""

    schedule: RanksSchedule
    labels: list[Labels]
    rank_names: dict[str, int]

    def named(self, name: str) -> RanksSchedule:
        """Half the time for a rank, a family, an op or all of the host's work."""
        schedule = self.schedule
        instructions = list(schedule.instructions)
        if name in self.rank_names:
            index = self.rank_names[name]
            own = instructions[index]
            instructions[index] = replace(
                own, host_seconds=0.5 * own.host_seconds, kernel_seconds=0.5 * own.kernel_seconds
            )  # its collectives' transfers are not its own
            return replace(schedule, instructions=tuple(instructions))
        for index, own_labels in enumerate(self.labels):
            if name == HOST or name in own_labels.families or name in own_labels.ops:
                instructions[index] = own_labels.halved(name)
        return replace(schedule, instructions=tuple(instructions), seconds=schedule.seconds * self._transfers(name))

    def _transfers(self, name: str) -> FloatArray:
        """The factor on each collective's transfer: it is faster if all members call it under the op that is."""
        schedule = self.schedule
        if name == COMMUNICATION:
            return np.full(len(schedule.seconds), 0.5)
        other = np.zeros(len(schedule.seconds), dtype=np.bool_)
        entries = zip(schedule.meeting.tolist(), schedule.rank.tolist(), schedule.instruction.tolist(), strict=True)
        for meeting, rank, instruction in entries:
            other[meeting] |= self.labels[rank].op[instruction] != name
        return np.where(other, 1.0, 0.5)


def _shares(segments: Sequence[RankSegment], key: Callable[[RankSegment], K]) -> dict[K, float]:
    whole = sum(s.end - s.start for s in segments)
    shares: dict[K, float] = {}
    for s in segments:
        shares[key(s)] = shares.get(key(s), 0.0) + (s.end - s.start) / max(whole, 1e-12)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
