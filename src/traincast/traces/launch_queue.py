"""The queue between host and device: how many calls waited in it, how many it takes, and which calls it held up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.link import Linked
from traincast.utils.arrays import BoolArray, IntArray, group_positions

_LEAST_DEPTH = 256  # queues of launches take about a thousand; a call behind fewer than this is not held by them
_USUAL_NS, _LONG_RATIO = 10_000, 1.5  # a call that is not held takes less, under a profiler too; a held one more
_LEAST_HELD = 5  # this many calls behind the same number of others are no chance
_NEAR_FULL = 0.97  # records of events and waits take places too, which a trace does not show


@dataclass(frozen=True, eq=False, kw_only=True)
class LaunchQueue:
    """What launch calls found before them; arrays have one entry per event, of which those of launch calls count.

    `waiting` is how many earlier calls of the same stream had work that was not done when the call returned,
    `released_by` the kernel whose end let a held call go on (-1: it was not held). `depth` is how many calls each
    device takes before it holds the host, for devices on which that was seen. `usual` is the median length of a call
    that was not held, nanoseconds.
    """

    waiting: IntArray
    released_by: IntArray
    depth: dict[int, int]
    usual: int

    @property
    def held(self) -> BoolArray:
        """Which events are calls that a full queue held."""
        return np.asarray(self.released_by >= 0)


@dataclass(frozen=True, eq=False, slots=True)
class _Entries:
    """Calls by stream, as their work stands in the streams: the call (-1 for work from before the trace), how many
    before it were waiting when it returned, and the last kernel that had ended by then (-1 for none)."""

    call: IntArray
    waiting: IntArray
    last_done: IntArray


def launch_queue(linked: Linked) -> LaunchQueue:
    """The queue of launches of a timeline, as its calls and kernels tell it.

    A held call is one behind about as many others as the queue takes, longer than usual, in which a kernel ended.
    """
    entries = _list_entries(linked)
    start, lengths = linked.events["start"], linked.events["duration"]
    known = entries.call >= 0
    waiting = np.zeros(len(linked.events), dtype=np.int64)
    np.maximum.at(waiting, entries.call[known], entries.waiting[known])
    calls, last = entries.call[known], entries.last_done[known]
    usual = min(float(np.median(lengths[calls])), _USUAL_NS) if len(calls) else 0.0
    ended = (last >= 0) & (linked.end[np.maximum(last, 0)] > start[calls])
    possible = ended & (lengths[calls] > _LONG_RATIO * usual) & (entries.waiting[known] >= _LEAST_DEPTH)
    calls, last = calls[possible], last[possible]
    device = _find_devices(linked, calls)
    depth = _find_depths(device, waiting[calls])
    full = waiting[calls] >= np.array([_NEAR_FULL * depth.get(number, np.inf) for number in device.tolist()])
    released = np.full(len(linked.events), -1, dtype=np.int64)
    released[calls[full]] = last[full]
    free = np.flatnonzero(linked.is_launch & (released < 0))
    typical = float(np.median(lengths[free])) if len(free) else 0.0
    return LaunchQueue(waiting=waiting, released_by=released, depth=depth, usual=round(min(typical, _USUAL_NS)))


def _find_devices(linked: Linked, calls: IntArray) -> IntArray:
    """The device that each call's first kernel ran on."""
    rows = [linked.kernels_of[call][0] for call in calls.tolist()]
    devices: IntArray = linked.events["device"][rows] if rows else np.empty(0, dtype=np.int64)
    return devices


def _find_depths(device: IntArray, waiting: IntArray) -> dict[int, int]:
    """Behind how many others most of these calls stand, by device."""
    depths = {}
    for number, places in group_positions(device):
        counts = np.bincount(waiting[places])
        if counts.max() >= _LEAST_HELD:
            depths[number] = int(np.argmax(counts))
    return depths


def _list_entries(linked: Linked) -> _Entries:
    device = linked.device
    parts = [_stream_entries(linked, device[places]) for _, places in group_positions(linked.stream[device])]
    nothing = (np.empty(0, dtype=np.int64),) * 3
    return _Entries(*(np.concatenate(column) for column in zip(nothing, *parts, strict=True)))


def _stream_entries(linked: Linked, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Call, waiting calls and last kernel done of one stream's calls; its kernels end in the order of their calls."""
    call = linked.launch[rows]
    # work from before the trace counts one by one
    key = np.where(call >= 0, call, -1 - np.arange(len(rows)))
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    done = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(done, group.reshape(-1), linked.end[rows])
    calls = call[first]
    issued = np.where(calls >= 0, linked.events["start"][np.maximum(calls, 0)], linked.events["start"][rows[0]] - 1)
    order = np.lexsort((done, issued))
    calls = calls[order]
    ends = np.maximum.accumulate(done[order])
    returned = np.where(calls >= 0, linked.end[np.maximum(calls, 0)], 0)
    over = np.minimum(np.searchsorted(ends, returned, side="right"), np.arange(len(calls)))
    by_end = rows[np.argsort(linked.end[rows], kind="stable")]
    place = np.searchsorted(linked.end[by_end], returned, side="right") - 1
    return calls, np.arange(len(calls)) - over, np.where(place >= 0, by_end[np.maximum(place, 0)], -1)
