"""Kernels that run while the device exchanges data with others take longer.

A kernel beside a transfer starts later, since its blocks find fewer free multiprocessors. By how much was fitted on
equal kernels with and without a collective beside them (`docs/evidence/collectives.md`). It also shares memory and
multiprocessors with the transfer while both run (`InStep.beside`). A rank that only waits for others in
a collective does not slow down what runs beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from traincast.costs.in_step import SHIPPED
from traincast.simulator.clocks import Clocks
from traincast.simulator.crew import Crew, CrewWalk
from traincast.simulator.ranks import Agenda, Meetings, walk_ranks
from traincast.utils.arrays import FloatArray

_CLOSE = 1e-3  # durations are settled when the step can change by less than this share
_MOST_WALKS = 20  # steps settle within a few; this only bounds one that does not


@cache
def late_start() -> float:
    """Seconds that a kernel wholly beside transfers takes longer."""
    profile = json.loads((files("traincast.simulator") / "data" / "overlap.json").read_text(encoding="utf-8"))
    return 1e-6 * float(profile["start_us"])


class Overlap:
    """The kernels of a crew and the transfers that may lie beside them, in the order in which the walk has them."""

    def __init__(self, walk: CrewWalk, number: int, meetings: Meetings) -> None:
        blocks, mine = walk.blocks, meetings.crew == number
        instructions = np.array(sorted(blocks.meetings), dtype=np.int64)  # the same for all ranks
        self.lasts = np.zeros((len(instructions), walk.crew.size))
        place = np.searchsorted(instructions, meetings.instruction[mine])
        self.lasts[place, meetings.row[mine]] = meetings.seconds[meetings.meeting[mine]]
        met = np.array([blocks.blocks[blocks.meetings[i]].first for i in instructions.tolist()], dtype=int)
        apart = walk.crew.transfer_launches(blocks)
        self.transfers = np.concatenate((met, apart))
        self.lasts = np.concatenate((self.lasts, walk.kernel_seconds[apart]))
        self.alone = walk.kernel_seconds

    def longer(self, walk: CrewWalk) -> FloatArray:
        """Kernels' seconds given where a walk put them and the transfers; none gets shorter than it was there."""
        if not len(self.transfers):
            return walk.kernel_seconds
        until = walk.ends[self.transfers]
        beside = covered((until - self.lasts).T, until.T, walk.starts.T, walk.ends.T).T
        share = beside / np.maximum(walk.ends - walk.starts, 1e-30)
        share[self.transfers] = beside[self.transfers] = 0.0
        slower = np.minimum(SHIPPED.beside * beside, SHIPPED.beside * self.alone)
        return np.asarray(np.maximum(walk.kernel_seconds, self.alone + share * late_start() + slower))


def walk_with_overlap(
    crews: Sequence[Crew],
    meetings: Meetings,
    agenda: Agenda,
    clocks: Sequence[Sequence[Clocks]] | None,
    *,
    gap: float,
) -> list[CrewWalk]:
    """Walks until kernels are as long as what runs beside them makes them.

    From walk to walk kernels only get longer, and none by more than a late start, so that this ends.
    """
    walks = walk_ranks(crews, meetings, gap=gap, clocks=clocks, agenda=agenda)
    if not len(meetings.meeting) and not any(len(crew.transfers) for crew in crews):
        return walks
    overlaps = [Overlap(walk, number, meetings) for number, walk in enumerate(walks)]
    for _ in range(_MOST_WALKS):
        longer = [overlap.longer(walk) for overlap, walk in zip(overlaps, walks, strict=True)]
        # a step grows by no more than its kernels do together
        growth = [(new - walk.kernel_seconds).sum(axis=0).max() for new, walk in zip(longer, walks, strict=True)]
        if max(growth) <= _CLOSE * max(walk.latest().max() for walk in walks):
            break
        walks = walk_ranks(crews, meetings, gap=gap, clocks=clocks, agenda=agenda, like=walks, kernel_seconds=longer)
    return walks


def covered(begin: FloatArray, until: FloatArray, start: FloatArray, end: FloatArray) -> FloatArray:
    """Seconds of each interval from `start` to `end` that lie in the union of its row's from `begin` to `until`."""
    order = np.argsort(begin, axis=1, kind="stable")
    begin, until = np.take_along_axis(begin, order, axis=1), np.take_along_axis(until, order, axis=1)
    reached = np.maximum.accumulate(until, axis=1)
    opens = np.maximum(begin, np.concatenate((begin[:, :1], reached[:, :-1]), axis=1))
    edges = np.stack((opens, np.maximum(opens, reached)), axis=2)
    # rows are looked up together, one after the other on one axis
    low = min(float(edges.min()), float(start.min(initial=np.inf)))
    span = max(float(edges.max()), float(end.max(initial=-np.inf))) - low
    offset = (np.arange(len(begin)) * (span + 1.0) - low)[:, None]
    axis = (edges + offset[:, :, None]).ravel()
    length = axis[1::2] - axis[::2]
    inside = np.repeat(np.cumsum(length), 2)
    inside[::2] -= length
    return np.asarray(np.interp(end + offset, axis, inside) - np.interp(start + offset, axis, inside))
