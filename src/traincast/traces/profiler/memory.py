"""Memory of devices over time, where the profiler recorded it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.simulator.memory.allocator import CachingAllocator
from traincast.traces.link import Linked
from traincast.utils.arrays import IntArray

_MOST_POINTS = 1_000  # of a curve: the highest of as many stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """A step on one device, in bytes: allocated at its begin, at most and at its end; `reserved` at most (-1 unknown).

    Where the profiler did not record totals, they count from the begin of the trace (`relative`). `replayed` is what
    our allocator reserves at most, given the recorded allocations from the begin of the trace on; `apart` the largest
    difference of allocated bytes between the two (both -1: addresses or totals are unknown)."""

    number: int
    device: int
    begin: int
    peak: int
    end: int
    reserved: int
    allocations: int
    relative: bool
    replayed: int = -1
    apart: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Bytes allocated and reserved (-1 unknown) on a device, seconds after the first step began."""

    device: int
    seconds: float
    allocated: int
    reserved: int


@dataclass(frozen=True, eq=False)
class _Curve:
    """One device's memory after each allocation, by time."""

    device: int
    time: IntArray
    allocated: IntArray
    reserved: IntArray
    relative: bool
    bytes: IntArray
    address: IntArray


def make_memory_rows(linked: Linked) -> tuple[MemoryRow, ...]:
    """Every step on every device whose memory was recorded."""
    rows = []
    for curve in _make_curves(linked):
        replayed = replay_recorded(curve.bytes, curve.address, curve.allocated) if not curve.relative else None
        for step in linked.steps:
            first, last = np.searchsorted(curve.time, [step.start, step.end]).tolist()
            if first == last:
                continue
            before = int(curve.allocated[first - 1]) if first else int(curve.allocated[first])
            rows.append(
                MemoryRow(
                    number=step.number, device=curve.device, begin=before,
                    peak=max(int(curve.allocated[first:last].max()), before), end=int(curve.allocated[last - 1]),
                    reserved=int(curve.reserved[first:last].max()), allocations=last - first, relative=curve.relative,
                    **({} if replayed is None else {
                        "replayed": int(replayed[1, first:last].max()),
                        "apart": int(abs(replayed[0, first:last] - curve.allocated[first:last]).max()),
                    }),
                )
            )  # fmt: skip
    return tuple(rows)


def replay_recorded(sizes: IntArray, addresses: IntArray, allocated: IntArray) -> IntArray | None:
    """Allocated and reserved bytes of our allocator after each recorded allocation (below 0: of a block given back),
    [2, allocations]. What is there before the first one is one block, and one for each that is given back later."""
    if not len(sizes) or (addresses < 0).any():
        return None
    moves = list(zip(sizes.tolist(), addresses.tolist(), strict=True))
    seen, before = set[int](), dict[int, int]()
    for nbytes, address in moves:
        if nbytes > 0:
            seen.add(address)
        elif address not in seen:
            before.setdefault(address, -nbytes)
    allocator = CachingAllocator()
    rest = int(allocated[0]) - moves[0][0] - sum(before.values())
    if rest > 0:
        allocator.allocate(rest)
    held = {address: allocator.allocate(nbytes) for address, nbytes in before.items()}
    found = np.empty((2, len(moves)), dtype=np.int64)
    for number, (nbytes, address) in enumerate(moves):
        if address in held:
            allocator.free(held.pop(address))
        if nbytes > 0:
            held[address] = allocator.allocate(nbytes)
        found[:, number] = allocator.allocated, allocator.reserved
    return found


def make_memory_points(linked: Linked) -> tuple[MemoryPoint, ...]:
    """The curve of every device; a long one by the highest point of each of a thousand stretches."""
    points = []
    for curve in _make_curves(linked):
        for chosen in np.array_split(np.arange(len(curve.time)), min(_MOST_POINTS, len(curve.time))):
            at = int(chosen[int(np.argmax(curve.allocated[chosen]))])
            seconds = 1e-9 * float(curve.time[at] - linked.steps[0].start)
            points.append(
                MemoryPoint(
                    device=curve.device, seconds=seconds, allocated=int(curve.allocated[at]),
                    reserved=int(curve.reserved[at]),
                )
            )  # fmt: skip
    return tuple(points)


def _make_curves(linked: Linked) -> list[_Curve]:
    memory = linked.trace.memory
    curves = []
    for device in np.unique(memory["device"]).tolist():
        rows = memory[memory["device"] == device]
        rows = rows[np.argsort(rows["time"], kind="stable")]
        relative = bool((rows["allocated"] < 0).any())
        allocated = np.cumsum(rows["bytes"]) if relative else rows["allocated"]
        curves.append(
            _Curve(device, rows["time"], allocated, rows["reserved"], relative, rows["bytes"], rows["address"])
        )
    return curves
