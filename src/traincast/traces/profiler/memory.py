"""Memory of devices over time, where the profiler recorded it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.link import Linked
from traincast.utils.arrays import IntArray

_MOST_POINTS = 1_000  # of a curve: the highest of as many stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """A step on one device, in bytes: allocated at its begin, at most and at its end; `reserved` at most (-1 unknown).

    Where the profiler did not record totals, they count from the begin of the trace (`relative`)."""

    number: int
    device: int
    begin: int
    peak: int
    end: int
    reserved: int
    allocations: int
    relative: bool


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


def make_memory_rows(linked: Linked) -> tuple[MemoryRow, ...]:
    """Every step on every device whose memory was recorded."""
    rows = []
    for curve in _make_curves(linked):
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
                )
            )  # fmt: skip
    return tuple(rows)


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
        curves.append(_Curve(device, rows["time"], allocated, rows["reserved"], relative))
    return curves
