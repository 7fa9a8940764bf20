"""Kernels that run while the device exchanges data with others take longer.

A kernel alongside a transfer starts later, since its blocks find fewer free multiprocessors. By how much was fitted on
equal kernels with and without a collective alongside them (`docs/evidence/collectives.md`). It also shares memory and
multiprocessors with the transfer while both run (`InStep.beside`). FBGEMM's kernels that fill a cache from host memory
take 16 blocks of 512 threads on every multiprocessor, more than it has room for: what would run alongside them waits
(copies from the host, which they share the link with, too). A rank that only waits for others in a collective does not
slow down what runs alongside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from traincast.costs.in_step import SHIPPED
from traincast.simulator.many_ranks import (
    Clocks,
    CollectiveIndex,
    Collectives,
    GroupSimulation,
    RankGroup,
    simulate_ranks,
)
from traincast.utils.arrays import FloatArray

_CLOSE = 1e-3  # durations are settled when the step can change by less than this share
_MOST_WALKS = 20  # steps settle within a few; this only bounds one that does not


@cache
def get_late_start_seconds() -> float:
    """Seconds that a kernel wholly alongside transfers takes longer."""
    profile = json.loads((files("traincast.simulator") / "data" / "overlap.json").read_text(encoding="utf-8"))
    return 1e-6 * float(profile["start_us"])


def slow_down_beside(seconds: FloatArray, share: FloatArray) -> FloatArray:
    """Seconds that kernels of these lengths alone take longer when a transfer runs alongside this share of them."""
    return np.asarray(share * (get_late_start_seconds() + SHIPPED.beside * seconds))


class Overlap:
    """The kernels of a rank group and the transfers that may be alongside them, in the order in which the simulation
    has them."""

    def __init__(
        self, simulation: GroupSimulation, number: int, collectives: Collectives, clocks: Sequence[Clocks] | None
    ) -> None:
        blocks, mine = simulation.blocks, collectives.group == number
        instructions = np.array(sorted(blocks.collective_blocks), dtype=np.int64)  # the same for all ranks
        self.lasts = np.zeros((len(instructions), simulation.group.size))
        place = np.searchsorted(instructions, collectives.instruction[mine])
        self.lasts[place, collectives.row[mine]] = collectives.seconds[collectives.collective[mine]]
        met = np.array([blocks.blocks[blocks.collective_blocks[i]].first for i in instructions.tolist()], dtype=int)
        apart = simulation.group.find_launches(blocks, simulation.group.transfers)
        self.fills = simulation.group.find_launches(blocks, simulation.group.fills)
        self.transfers = np.concatenate((met, apart))
        self.lasts = np.concatenate((self.lasts, simulation.kernel_seconds[apart]))
        self.alone = self._beside = simulation.kernel_seconds
        schedule = simulation.group.schedule
        streams, self._firsts = np.unique(schedule.target[blocks.launch_order], return_index=True)
        # until when each stream runs kernels of the step before
        self._before = np.array([[rank.streams[s] for rank in clocks or ()] for s in streams.tolist()])

    def longer(self, simulation: GroupSimulation) -> FloatArray:
        """Kernels' seconds given where a simulation put them and the transfers; but for those that fills hold up, none
        gets shorter than it was there."""
        if len(self.transfers):
            until = simulation.ends[self.transfers]
            beside = compute_covered_seconds((until - self.lasts).T, until.T, simulation.starts.T, simulation.ends.T).T
            share = beside / np.maximum(simulation.ends - simulation.starts, 1e-30)
            share[self.transfers] = beside[self.transfers] = 0.0
            slower = np.minimum(SHIPPED.beside * beside, SHIPPED.beside * self.alone)
            self._beside = np.maximum(self._beside, self.alone + share * get_late_start_seconds() + slower)
        return self._beside + self._find_held_seconds(simulation) if len(self.fills) else self._beside

    def _find_held_seconds(self, simulation: GroupSimulation) -> FloatArray:
        """Seconds for which kernels that meet a fill find no free multiprocessor: until it ends."""
        held = np.zeros_like(self.alone)
        for fill in self.fills.tolist():
            begin, until = simulation.starts[fill], simulation.ends[fill]
            meets = (simulation.starts < until) & (simulation.starts + self._beside > begin)
            held += np.where(meets, until - np.maximum(simulation.starts, begin), 0.0)
            if self._before.size:  # what of the step before it has held up is not done when this one says
                held[self._firsts] += np.maximum(0.0, np.minimum(until, self._before) - begin)
        held[self.fills] = held[self.transfers] = 0.0
        return held


def simulate_with_overlap(
    groups: Sequence[RankGroup],
    collectives: Collectives,
    index: CollectiveIndex,
    clocks: Sequence[Sequence[Clocks]] | None,
    *,
    gap: float,
) -> list[GroupSimulation]:
    """Simulates until kernels are as long as what runs alongside them makes them.

    From round to round kernels beside transfers only get longer, and none by more than a late start; those that fills
    hold up are the first that meet them. So this ends.
    """
    simulations = simulate_ranks(groups, collectives, gap=gap, clocks=clocks, index=index)
    if not len(collectives.collective) and not any(len(group.transfers) + len(group.fills) for group in groups):
        return simulations
    overlaps = [
        Overlap(simulation, number, collectives, None if clocks is None else clocks[number])
        for number, simulation in enumerate(simulations)
    ]
    for _ in range(_MOST_WALKS):
        longer = [overlap.longer(simulation) for overlap, simulation in zip(overlaps, simulations, strict=True)]
        # a step changes by no more than its kernels do together
        growth = [
            np.abs(new - simulation.kernel_seconds).sum(axis=0).max()
            for new, simulation in zip(longer, simulations, strict=True)
        ]
        if max(growth) <= _CLOSE * max(simulation.latest().max() for simulation in simulations):
            break
        simulations = simulate_ranks(
            groups, collectives, gap=gap, clocks=clocks, index=index, like=simulations, kernel_seconds=longer
        )
    return simulations


def compute_covered_seconds(begin: FloatArray, until: FloatArray, start: FloatArray, end: FloatArray) -> FloatArray:
    """Seconds of each interval from `start` to `end` that are in the union of its row's from `begin` to `until`."""
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
