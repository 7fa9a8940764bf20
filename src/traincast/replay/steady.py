"""Traced steps as they would go on for ever: what one takes when host and device have settled into their pace.

The distance between two markers is the host's. A device that falls behind shows in it only once the queue of launches
is full, which may be many steps later. So the traced steps are walked several times in a row, and a step is what every
further one adds to the moment when host and device are both done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from traincast.arrays import FloatArray, IndexArray
from traincast.replay.timeline import STEP_EDGE, TimelineInstructions
from traincast.traces.link import Linked
from traincast.walk.clocks import Clocks
from traincast.walk.crew import Crew, CrewWalk
from traincast.walk.critical import Segment, critical_path
from traincast.walk.ranks import Meetings, walk_ranks
from traincast.walk.schedule import Schedule

_ROUNDS, _SETTLED = 4, 2  # rounds of the traced steps that are walked, and those after which they count
_SAME_PACE = 1e-3  # relative: rounds of a host that a device holds differ by next to nothing
_MOST_VALUES = 1 << 24  # seconds walked side by side: 128 MB


def cycle(linked: Linked, instructions: TimelineInstructions) -> TimelineInstructions:
    """The instructions of the marked steps alone; all of them where no step was marked."""
    if not linked.marked:
        return instructions
    edges = np.flatnonzero(instructions.row == STEP_EDGE)
    return _part(instructions, np.arange(edges[0] + 1, edges[-1] + 1))


def _part(instructions: TimelineInstructions, chosen: IndexArray) -> TimelineInstructions:
    schedule = replace(instructions.schedule, **_columns(instructions.schedule, chosen))
    return replace(instructions, schedule=schedule, **_columns(instructions, chosen))


def _columns(table: Schedule | TimelineInstructions, chosen: IndexArray) -> dict[str, Any]:
    """These rows of all columns of a table."""
    columns = {f.name: getattr(table, f.name) for f in fields(table)}
    return {name: column[chosen] for name, column in columns.items() if isinstance(column, np.ndarray)}


def steady_seconds(linked: Linked, variants: Sequence[TimelineInstructions]) -> FloatArray:
    """Seconds of one round of the steps in each variant: the same instructions (see `cycle`) with other lengths."""
    size = max(_MOST_VALUES // max(len(variants[0].row), 1), 1)
    parts = [_settled(linked, variants[first : first + size]) for first in range(0, len(variants), size)]
    return np.concatenate(parts)


def _settled(linked: Linked, variants: Sequence[TimelineInstructions]) -> FloatArray:
    if not linked.marked:  # no step but a whole program
        return _rounds(variants, 1)[0].latest()
    walks = _rounds(variants, _ROUNDS)
    return np.asarray((walks[-1].latest() - walks[_SETTLED - 1].latest()) / (_ROUNDS - _SETTLED))


def steady_path(instructions: TimelineInstructions) -> list[Segment]:
    """The path through one round of the steps (see `cycle`) as they go on, over as long as a round takes.

    Where the host keeps the pace it leads to the end of its main thread: what the device has left to do then delays
    nothing. Where the host runs ahead of the device it leads to the end of all. What a round waits for may lie in the
    one before, so two rounds are walked as one.
    """
    count = len(instructions.row)
    twice = _part(instructions, np.tile(np.arange(count), 2))
    before, last = _rounds([twice], _ROUNDS // 2)
    pace = float(last.latest()[0] - before.latest()[0])
    host_pace = last.clocks()[0].threads[0] - before.clocks()[0].threads[0]
    path = critical_path([last], thread=0 if host_pace > (1 - _SAME_PACE) * pace else None)
    begin = path[-1].end - 0.5 * pace if path else 0.0
    return [
        replace(segment, instruction=segment.instruction % count, start=max(segment.start, begin))
        for segment in path
        if segment.end > begin
    ]


def whole_walk(instructions: TimelineInstructions) -> CrewWalk:
    """All instructions walked once, from the trace's first moment."""
    return _rounds([instructions], 1)[0]


def _rounds(variants: Sequence[TimelineInstructions], count: int) -> list[CrewWalk]:
    """The instructions walked `count` times in a row, side by side with other lengths."""
    first = variants[0]
    crew = Crew(
        first.schedule,
        np.stack([variant.host_seconds for variant in variants]),
        np.stack([variant.device_seconds for variant in variants]),
    )
    clocks = [Clocks.at_zero(first.schedule, first.gap)] * len(variants)
    walks: list[CrewWalk] = []
    for _ in range(count):
        (walked,) = walk_ranks([crew], Meetings.none(), gap=first.gap, clocks=[clocks])
        walks.append(walked)
        clocks = walked.clocks()
    return walks
