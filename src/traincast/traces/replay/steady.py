"""Traced steps as they would go on for ever: what one takes when host and device have settled into their pace.

The distance between two markers is the host's. A device that falls behind shows in it only once the queue of launches
is full, which may be many steps later. So the traced steps are simulated several times in a row, and a step is what
every further one adds to the moment when host and device are both done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np

from traincast.simulator.critical import Segment, find_critical_path
from traincast.simulator.many_ranks import Collectives, simulate_ranks
from traincast.simulator.rank_group import Clocks, GroupSimulation, RankGroup
from traincast.simulator.schedule import Schedule
from traincast.traces.link import Linked
from traincast.traces.replay.timeline import STEP_EDGE, TimelineInstructions
from traincast.utils.arrays import FloatArray, IndexArray

_ROUNDS, _SETTLED = 4, 2  # rounds of the traced steps that are simulated, and those after which they count
_SAME_PACE = 1e-3  # relative: rounds of a host that a device holds differ by next to nothing
_MOST_VALUES = 1 << 22  # instructions times variants simulated side by side, each of which takes some 50 bytes


def select_marked_steps(linked: Linked, instructions: TimelineInstructions) -> TimelineInstructions:
    """The instructions of the marked steps alone; all of them where no step was marked."""
    if not linked.marked:
        return instructions
    edges = np.flatnonzero(instructions.row == STEP_EDGE)
    return _select_instructions(instructions, np.arange(edges[0] + 1, edges[-1] + 1))


def _select_instructions(instructions: TimelineInstructions, chosen: IndexArray) -> TimelineInstructions:
    schedule = replace(instructions.schedule, **_select_columns(instructions.schedule, chosen))
    return replace(instructions, schedule=schedule, **_select_columns(instructions, chosen))


def _select_columns(table: Schedule | TimelineInstructions, chosen: IndexArray) -> dict[str, Any]:
    """These rows of all columns of a table."""
    columns = {f.name: getattr(table, f.name) for f in fields(table)}
    return {name: column[chosen] for name, column in columns.items() if isinstance(column, np.ndarray)}


def compute_steady_seconds(linked: Linked, variants: Iterable[TimelineInstructions]) -> FloatArray:
    """Seconds of one round of the steps in each variant: the same instructions (see `select_marked_steps`) with other
    lengths.

    They are asked for a few at a time, so that many variants of a long trace need not be held at once.
    """
    coming = iter(variants)
    batch, parts = list(islice(coming, 1)), []
    size = max(_MOST_VALUES // max(len(batch[0].row), 1), 1)
    batch += islice(coming, size - 1)
    while batch:
        parts.append(_simulate_until_settled(linked, batch))
        batch = list(islice(coming, size))
    return np.concatenate(parts)


def _simulate_until_settled(linked: Linked, variants: Sequence[TimelineInstructions]) -> FloatArray:
    if not linked.marked:  # no step but a whole program
        return next(_simulate_rounds(variants, 1)).latest()
    done = [simulated.latest() for simulated in _simulate_rounds(variants, _ROUNDS)]
    return np.asarray((done[-1] - done[_SETTLED - 1]) / (_ROUNDS - _SETTLED))


def find_steady_path(instructions: TimelineInstructions) -> list[Segment]:
    """The path through one round of the steps (see `select_marked_steps`) as they go on, over as long as a round takes.

    Where the host keeps the pace it leads to the end of its main thread: what the device has left to do then delays
    nothing. Where the host runs ahead of the device it leads to the end of all. Where it comes from repeats itself with
    every round, but not where it ends: that may be work which nothing later waits for. So its last step is left out,
    and as long as a round takes before that counts. What a round waits for may be in the one before: several are
    simulated as one.
    """
    count, steps = len(instructions.row), int((instructions.row == STEP_EDGE).sum())
    as_one = 2 if steps > 1 else 3
    rounds = _simulate_rounds([_select_instructions(instructions, np.tile(np.arange(count), as_one))], 2)
    before = _find_ends(next(rounds))
    last = next(rounds)
    pace, host_pace = ((now - then) / as_one for now, then in zip(_find_ends(last), before, strict=True))
    left_out = pace / steps
    path = find_critical_path(
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


def _find_ends(simulated: GroupSimulation) -> tuple[float, float]:
    """When everything is done, and when the main thread is."""
    return float(simulated.latest()[0]), simulated.clocks()[0].threads[0]


def simulate_once(instructions: TimelineInstructions) -> GroupSimulation:
    """All instructions simulated once, from the trace's first moment."""
    return next(_simulate_rounds([instructions], 1))


def _simulate_rounds(variants: Sequence[TimelineInstructions], count: int) -> Iterator[GroupSimulation]:
    """The instructions simulated `count` times in a row, side by side with other lengths."""
    first = variants[0]
    group = RankGroup(
        first.schedule,
        np.stack([variant.host_seconds for variant in variants]),
        np.stack([variant.device_seconds for variant in variants]),
    )
    clocks = [Clocks.at_zero(first.schedule, first.gap)] * len(variants)
    for _ in range(count):
        (simulated,) = simulate_ranks([group], Collectives.none(), gap=first.gap, clocks=[clocks])
        clocks = simulated.clocks()
        yield simulated
        del simulated  # while the next round is simulated
