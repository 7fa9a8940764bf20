"""Traced steps as they would go on for ever: what one takes when host and device have settled into their pace.

The distance between two markers is the host's. A device that falls behind shows in it only once the queue of launches
is full, which may be many steps later. So the traced steps are walked several times in a row, and a step is what every
further one adds to the moment when host and device are both done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np

from traincast.simulator.clocks import Clocks
from traincast.simulator.crew import Crew, CrewWalk
from traincast.simulator.critical import Segment, critical_path
from traincast.simulator.ranks import Meetings, walk_ranks
from traincast.simulator.schedule import Schedule
from traincast.traces.link import Linked
from traincast.traces.replay.timeline import STEP_EDGE, TimelineInstructions
from traincast.utils.arrays import FloatArray, IndexArray

_ROUNDS, _SETTLED = 4, 2  # rounds of the traced steps that are walked, and those after which they count
_SAME_PACE = 1e-3  # relative: rounds of a host that a device holds differ by next to nothing
_MOST_VALUES = 1 << 22  # instructions times variants walked side by side, each of which takes some 50 bytes


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


def steady_seconds(linked: Linked, variants: Iterable[TimelineInstructions]) -> FloatArray:
    """Seconds of one round of the steps in each variant: the same instructions (see `cycle`) with other lengths.

    They are asked for a few at a time, so that many variants of a long trace need not be held at once.
    """
    coming = iter(variants)
    batch, parts = list(islice(coming, 1)), []
    size = max(_MOST_VALUES // max(len(batch[0].row), 1), 1)
    batch += islice(coming, size - 1)
    while batch:
        parts.append(_settled(linked, batch))
        batch = list(islice(coming, size))
    return np.concatenate(parts)


def _settled(linked: Linked, variants: Sequence[TimelineInstructions]) -> FloatArray:
    if not linked.marked:  # no step but a whole program
        return next(_rounds(variants, 1)).latest()
    done = [walked.latest() for walked in _rounds(variants, _ROUNDS)]
    return np.asarray((done[-1] - done[_SETTLED - 1]) / (_ROUNDS - _SETTLED))


def steady_path(instructions: TimelineInstructions) -> list[Segment]:
    """The path through one round of the steps (see `cycle`) as they go on, over as long as a round takes.

    Where the host keeps the pace it leads to the end of its main thread: what the device has left to do then delays
    nothing. Where the host runs ahead of the device it leads to the end of all. Where it comes from repeats itself with
    every round, but not where it ends: that may be work which nothing later waits for. So its last step is left out,
    and as long as a round takes before that counts. What a round waits for may lie in the one before: several are
    walked as one.
    """
    count, steps = len(instructions.row), int((instructions.row == STEP_EDGE).sum())
    as_one = 2 if steps > 1 else 3
    rounds = _rounds([_part(instructions, np.tile(np.arange(count), as_one))], 2)
    before = _ends(next(rounds))
    last = next(rounds)
    pace, host_pace = ((now - then) / as_one for now, then in zip(_ends(last), before, strict=True))
    left_out = pace / steps
    path = critical_path(
        [last],
        thread=0 if host_pace > (1 - _SAME_PACE) * pace else None,
        seconds=(pace + left_out) * (1 + _SAME_PACE),  # a little more than is needed: sums are rounded
    )
    end = path[-1].end - left_out if path else 0.0
    return [
        replace(
            segment,
            instruction=segment.instruction % count,
            start=max(segment.start, end - pace),
            end=min(segment.end, end),
        )
        for segment in path
        if segment.end > end - pace and segment.start < end
    ]


def _ends(walked: CrewWalk) -> tuple[float, float]:
    """When everything is done, and when the main thread is."""
    return float(walked.latest()[0]), walked.clocks()[0].threads[0]


def whole_walk(instructions: TimelineInstructions) -> CrewWalk:
    """All instructions walked once, from the trace's first moment."""
    return next(_rounds([instructions], 1))


def _rounds(variants: Sequence[TimelineInstructions], count: int) -> Iterator[CrewWalk]:
    """The instructions walked `count` times in a row, side by side with other lengths."""
    first = variants[0]
    crew = Crew(
        first.schedule,
        np.stack([variant.host_seconds for variant in variants]),
        np.stack([variant.device_seconds for variant in variants]),
    )
    clocks = [Clocks.at_zero(first.schedule, first.gap)] * len(variants)
    for _ in range(count):
        (walked,) = walk_ranks([crew], Meetings.none(), gap=first.gap, clocks=[clocks])
        clocks = walked.clocks()
        yield walked
        del walked  # while the next round is walked
