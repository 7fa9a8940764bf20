"""Steps of training through the caching allocator until what it reserves no longer grows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from traincast.ir.memory import MemoryEvents
from traincast.simulator.memory.allocator import UNLIMITED, AllocatorSettings, Block, CachingAllocator, OutOfMemoryError

MOST_STEPS = 4
"""Steps that are replayed at most: fragmentation is stable after two or three."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator did: peaks in bytes over all steps, their number, how often it gave its cache back to the
    driver, and what a block that did not fit wanted (0: all fitted)."""

    allocated: int
    active: int
    reserved: int
    steps: int
    retries: int
    missing: int
    allocator: CachingAllocator


def replay_steps(
    events: MemoryEvents, settings: AllocatorSettings | None = None, *, capacity: int = UNLIMITED
) -> Replay:
    """Replays steps on a device that can give `capacity` bytes. Other streams are done with a freed block."""
    allocator = CachingAllocator(settings, capacity)
    step, missing = _Step(events, allocator), 0
    steps = 1
    try:
        step.allocate_resident()
        for steps in range(1, MOST_STEPS + 1):
            before = allocator.reserved
            step.run(first=steps == 1)
            if steps > 1 and allocator.reserved == before:
                break
    except OutOfMemoryError as error:
        missing = error.wanted
    return Replay(
        allocator.peak_allocated, allocator.peak_active, allocator.peak_reserved, steps, allocator.retries, missing,
        allocator,
    )  # fmt: skip


class _Step:
    """Steps of one rank on one allocator."""

    def __init__(self, events: MemoryEvents, allocator: CachingAllocator) -> None:
        self.events, self.allocator = events, allocator
        self.held: list[Block | None] = [None] * len(events.nbytes)
        self.sizes, self.streams = events.nbytes.tolist(), events.stream.tolist()
        self.handed_on = _pair_steps(events)
        leaves = np.flatnonzero((events.born >= 0) & (events.gone >= events.ticks)).tolist()
        self.dropped = sorted(set(leaves) - {made for made, _ in self.handed_on})

    def allocate_resident(self) -> None:
        """What is there before the first step, in the order in which it is made."""
        for number in np.flatnonzero((self.events.born < 0) & (self.events.appears < 0)).tolist():
            self.held[number] = self.allocator.allocate(self.sizes[number], 0, number)

    def run(self, *, first: bool) -> None:
        """One step; the device is done with it before the next one begins. What it leaves and the next one does not
        find (gradients that are set to None) goes in between."""
        held, allocator, sizes, streams = self.held, self.allocator, self.sizes, self.streams
        for _, number, comes in list_step_events(self.events, first=first):
            if comes:
                held[number] = allocator.allocate(sizes[number], streams[number], number)
                continue
            block = held[number]
            if block is None:  # there before the first step only
                continue
            held[number] = None
            allocator.free(block)
        allocator.synchronize()
        for made, found in self.handed_on:
            held[found], held[made] = held[made], None
        for number in self.dropped:
            block = held[number]
            if block is not None:
                allocator.free(block)
                held[number] = None


@lru_cache(maxsize=4)  # of searches that replay one step again and again
def _pair_steps(events: MemoryEvents) -> list[tuple[int, int]]:
    """Blocks that a step leaves to the next one (a batch that was fetched ahead, gradients, the loss with its graph),
    each with the block that is there before a step and goes in it: the same one, a step later. Of blocks of one size
    those of the same category come first; a step finds what the one before made among its inputs."""
    left: dict[int, list[int]] = {}
    for number in np.flatnonzero((events.born < 0) & (events.gone < events.ticks)).tolist():
        left.setdefault(int(events.nbytes[number]), []).append(number)
    pairs = []
    for number in np.flatnonzero((events.born >= 0) & (events.gone >= events.ticks)).tolist():
        found = left.get(int(events.nbytes[number]))
        if found:
            same = next((one for one in found if events.category[one] == events.category[number]), found[0])
            found.remove(same)
            pairs.append((number, same))
    return pairs


@lru_cache(maxsize=8)
def list_step_events(events: MemoryEvents, *, first: bool) -> list[tuple[int, int, bool]]:
    """What comes and goes in a step, in the host's order: tick, block, whether it comes."""
    born = np.where((events.born < 0) & first, events.appears, events.born)
    comes, goes = np.flatnonzero(born >= 0), np.flatnonzero(events.gone < events.ticks)
    ticks = np.concatenate((born[comes], events.gone[goes]))
    number = np.concatenate((comes, goes))
    order = np.argsort(ticks, kind="stable")
    kinds = order < len(comes)
    return list(zip(ticks[order].tolist(), number[order].tolist(), kinds.tolist(), strict=True))
