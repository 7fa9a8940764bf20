"""Why kernels began when they did: what was before them on their stream, who had the device, and what else kept them.

A kernel can begin when its call has returned, the kernel before it on its stream has ended and the event it waits for
has come. What it begins later than that is its lateness. In a queue some of that is the usual gap between two kernels;
on a full device it is another stream's kernel; the rest (nodes of a graph, uploads, what no trace shows) stays as
measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.intervals import Intervals
from traincast.traces.link import Linked
from traincast.utils.arrays import IntArray, group_positions

# a launched kernel starts within a few microseconds; one that waited longer than this was kept by something
_LATE_NS = 10_000
_CROWDED_SHARE = 0.9  # of its lateness, during which other streams kept the device busy
_FOLLOWS_NS = 25_000  # a kernel that was crowded out begins this long after the one that had the device, at most
_USUAL_GAP = 0.1  # quantile: gaps have a sharp lower edge and a long tail


@dataclass(frozen=True, eq=False, kw_only=True)
class Lateness:
    """Arrays have one entry per event, of which those of kernels, copies and memsets count; nanoseconds.

    `free` is when the one before on the stream ended (0 for none), `behind` the kernel of another stream that had the
    device until this one began (-1 for none), `after` one of another stream that a wait call made it wait for though it
    had ended by then (-1 for none), `kept` how long it was kept by what no trace shows. `gap` is the usual
    time between two kernels of a queue.
    """

    free: IntArray
    behind: IntArray
    after: IntArray
    kept: IntArray
    gap: int


def compute_lateness(linked: Linked) -> Lateness:
    """The lateness of everything that ran on a device."""
    rows, count = linked.device, len(linked.events)
    free = np.zeros(count, dtype=np.int64)
    issue = np.zeros(count, dtype=np.int64)
    for _, places in group_positions(linked.stream[rows]):
        mine = rows[places]
        free[mine[1:]] = np.maximum.accumulate(linked.end[mine])[:-1]
        issue[mine] = _find_issue_times(linked, mine)
    start, after, ready = linked.events["start"], _find_ordered_after(linked), np.maximum(free, issue)
    for source in (linked.waited_for, after):
        ready = np.where(source >= 0, np.maximum(ready, linked.end[np.maximum(source, 0)]), ready)
    late = np.zeros(count, dtype=np.int64)
    late[rows] = np.maximum(start[rows] - np.maximum(ready[rows], 0), 0)
    late[rows[ready[rows] == 0]] = 0  # nothing is known of what was before
    queued = (free > 0) & (free >= ready)
    gaps = late[rows[queued[rows] & (late[rows] < _LATE_NS)]]
    gap = int(np.quantile(gaps, _USUAL_GAP)) if len(gaps) else 0
    behind = _find_crowding_kernels(linked, rows[late[rows] > _LATE_NS], ready)
    kept = np.where(queued, late - gap, np.where(late > _LATE_NS, late, 0))
    kept = np.where(behind >= 0, start - linked.end[np.maximum(behind, 0)], kept)
    return Lateness(free=free, behind=behind, after=after, kept=np.maximum(kept, 0), gap=gap)


def _find_issue_times(linked: Linked, rows: IntArray) -> IntArray:
    """When the calls of a stream's kernels had returned, or their kernels begun if that was earlier; a kernel without
    a call counts as issued with the one before it."""
    launch = linked.launch[rows]
    returned = np.where(launch >= 0, linked.end[np.maximum(launch, 0)], 0)
    return np.maximum.accumulate(np.minimum(returned, linked.events["start"][rows]))


def _find_crowding_kernels(linked: Linked, late: IntArray, ready: IntArray) -> IntArray:
    """The kernel of another stream after which each of these kernels began, if the device had been busy until then."""
    behind = np.full(len(linked.events), -1, dtype=np.int64)
    start, device = linked.events["start"], linked.events["device"]
    for number, places in group_positions(device[late]):
        there = linked.device[(device[linked.device] == number) & (linked.launch[linked.device] >= 0)]
        busy = Intervals.from_spans(start[there], linked.end[there])
        by_end = there[np.argsort(linked.end[there], kind="stable")]
        rows = late[places]
        rows = rows[linked.launch[rows] >= 0]
        waited = start[rows] - ready[rows]
        rows = rows[busy.compute_covered(ready[rows], start[rows]) > _CROWDED_SHARE * waited]
        ended = np.searchsorted(linked.end[by_end], start[rows], side="right")
        for row, count in zip(rows.tolist(), ended.tolist(), strict=True):
            behind[row] = _find_last_before(linked, by_end, row, count)
    return behind


def _find_last_before(linked: Linked, by_end: IntArray, row: int, ended: int) -> int:
    """The kernel of another stream, called earlier, that ended last before this one began, if that was just before; of
    those in the order of their ends this many had ended by then."""
    start, called = int(linked.events["start"][row]), int(linked.events["start"][linked.launch[row]])
    place = ended - 1
    while place >= 0 and linked.end[by_end[place]] >= start - _FOLLOWS_NS:
        other = int(by_end[place])
        if linked.stream[other] != linked.stream[row] and linked.events["start"][linked.launch[other]] < called:
            return other
        place -= 1
    return -1


def _find_ordered_after(linked: Linked) -> IntArray:
    """For the first kernel that a stream got after a wait call: the last one called before on another stream.

    No trace says which event a wait call means; streams are made to wait for what was given to another one just before.
    Only what had ended when the kernel began can be meant; what had not shows in the times (`Linked.waited_for`).
    """
    events, after = linked.events, np.full(len(linked.events), -1, dtype=np.int64)
    waits = np.sort(events["start"][linked.is_wait])
    device = linked.device[linked.launch[linked.device] >= 0]
    device = device[np.argsort(events["start"][linked.launch[device]], kind="stable")]
    calls_before = np.searchsorted(waits, events["start"][linked.launch[device]])
    seen: dict[int, int] = {}  # stream -> wait calls before its last launch
    latest: dict[int, int] = {}  # stream -> its last kernel; the stream that got one last stands last
    for row, number in zip(device.tolist(), calls_before.tolist(), strict=True):
        stream = int(linked.stream[row])
        other = next((kernel for s, kernel in reversed(latest.items()) if s != stream), -1)
        if other >= 0 and number > seen.get(stream, 0) and linked.end[other] <= events["start"][row]:
            after[row] = other
        seen[stream] = number
        latest.pop(stream, None)
        latest[stream] = row
    return after
