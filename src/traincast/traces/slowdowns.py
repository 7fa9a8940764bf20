"""What holds work up: the queue between host and device, and collectives that run alongside kernels.

A kernel can begin when its call has returned, the kernel before it on its stream has ended and the event it waits for
has come. What it begins later than that is its lateness. In a queue some of that is the usual gap between two kernels;
on a full device it is another stream's kernel; the rest (nodes of a graph, uploads, what no trace shows) stays as
measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.arguments import parse_arguments
from traincast.traces.breakdown import Intervals
from traincast.traces.classify import COMMUNICATION
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.utils.arrays import BoolArray, FloatArray, IntArray, group_positions

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


_BESIDE, _ALONE = 0.9, 0.05  # shares of a kernel's time with company that count as alongside a collective, and as alone
_LEAST_ALONE = 2  # one kernel alone may have been an outlier itself


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Of a kernel family: how many kernels ran alongside a collective, the time that they took over the time that the
    same kernels (equal names, equal op arguments) take alone, and the quartiles of that ratio over kernels."""

    count: int
    ratio: float
    quartiles: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """A kernel that ran alongside a collective: what it took, and what equal ones (number `group`) take alone;
    seconds."""

    family: str
    group: int
    alone: float
    took: float


def compute_slowdowns(linked: Linked) -> dict[str, Slowdown]:
    """By family, for families in which some kernel ran both ways."""
    by_family: dict[str, list[tuple[float, float]]] = {}
    for pair in find_overlapped_pairs(linked):
        by_family.setdefault(pair.family, []).append((pair.alone, pair.took))
    return {name: _summarise_pairs(pairs) for name, pairs in sorted(by_family.items())}


def find_overlapped_pairs(linked: Linked) -> list[Pair]:
    """Every kernel that ran alongside a collective and of which equal ones ran alone."""
    rows = linked.device[(linked.launch[linked.device] >= 0) & (linked.step[linked.device] >= 0)]
    family = linked.find_families(rows)
    computes = (family != COMMUNICATION) & (linked.events["kind"][rows] == Kind.KERNEL)
    beside, elsewhere = compute_overlaps(linked, rows)
    length = np.maximum(linked.events["duration"][rows].astype(np.float64), 1.0)
    alone = computes & (beside + elsewhere < _ALONE * length)
    with_comm = computes & (beside > _BESIDE * length) & (elsewhere < (1.0 - _BESIDE) * length)
    parent = linked.parent[linked.launch[rows]]
    arguments = np.where(parent >= 0, linked.events["details"][parent], 0)
    # without the sizes of all its arguments it is not known which kernels are equal
    told = np.array([_has_details(details) for details in linked.trace.details])
    alone, with_comm = alone & told[arguments], with_comm & told[arguments]
    keys = np.stack([linked.events["name"][rows], arguments], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.ravel()
    pairs = []
    for number, equal in group_positions(group):
        reference = length[equal[alone[equal]]]
        if len(reference) >= _LEAST_ALONE:
            base = 1e-9 * float(np.median(reference))
            kind = str(family[equal[0]])
            pairs += [Pair(kind, number, base, 1e-9 * float(took)) for took in length[equal[with_comm[equal]]]]
    return pairs


def _has_details(details: bytes) -> bool:
    recorded = parse_arguments(details) if details else None
    return recorded is not None and not recorded.incomplete


def compute_overlaps(linked: Linked, rows: IntArray) -> tuple[FloatArray, FloatArray]:
    """For every kernel the nanoseconds that collectives, and that anything else on other streams, ran alongside it."""
    device = linked.device
    start, end, stream = linked.events["start"][device], linked.end[device], linked.stream[device]
    communicates = linked.find_communication(device)
    first, last = linked.events["start"][rows], linked.end[rows]
    beside = _compute_covered(Intervals.from_spans(start[communicates], end[communicates]), first, last)
    computing = np.flatnonzero(~communicates)
    streams = dict(group_positions(stream[computing]))
    unions = {number: Intervals.from_spans(start[computing[at]], end[computing[at]]) for number, at in streams.items()}
    elsewhere = _compute_running_time(list(unions.values()), last) - _compute_running_time(list(unions.values()), first)
    for number, at in group_positions(linked.stream[rows]):
        if number in unions:
            elsewhere[at] -= _compute_running_time([unions[number]], last[at]) - _compute_running_time(
                [unions[number]], first[at]
            )
    return beside, elsewhere.astype(np.float64)


def _compute_running_time(unions: list[Intervals], moments: IntArray) -> IntArray:
    """Nanoseconds that streams, busy in these intervals, had run together by each moment."""
    if not unions:
        return np.zeros(len(moments), dtype=np.int64)
    starts = np.concatenate([union.start for union in unions])
    ends = np.concatenate([union.end for union in unions])
    turns = np.concatenate([starts, ends])
    order = np.argsort(turns, kind="stable")
    turns = turns[order]
    busy = np.cumsum(np.where(order < len(starts), 1, -1))  # streams from each turn to the next
    done = np.concatenate([[0], np.cumsum(busy[:-1] * np.diff(turns))])
    place = np.searchsorted(turns, moments, side="right") - 1
    since = np.where(place >= 0, done[place] + busy[place] * (moments - turns[place]), 0)
    return np.asarray(since, dtype=np.int64)


def _compute_covered(intervals: Intervals, first: IntArray, last: IntArray) -> FloatArray:
    """Nanoseconds of each span that the intervals cover."""
    if not len(intervals.start):
        return np.zeros(len(first))
    origin = int(intervals.start[0])
    moments = np.stack([intervals.start, intervals.end], axis=1).ravel() - origin
    done = np.cumsum(intervals.end - intervals.start)
    sums = np.stack([np.concatenate(([0], done[:-1])), done], axis=1).ravel()
    low, high = (np.interp(moment - origin, moments, sums) for moment in (first, last))
    return np.asarray(high - low)


def _summarise_pairs(pairs: list[tuple[float, float]]) -> Slowdown:
    alone, took = np.array(pairs).T
    low, median, high = np.quantile(took / alone, [0.25, 0.5, 0.75]).tolist()
    return Slowdown(len(pairs), float(took.sum() / alone.sum()), (low, median, high))
