"""The tree of a timeline's host events, kernels and the calls that launched them, and whether the clocks of both
agree."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from traincast.traces.events import DEVICE_KINDS, HOST_KINDS, Kind, TimelineTrace
from traincast.utils.arrays import BoolArray, IntArray
from traincast.utils.errors import TraincastError, escape_text

# annotations that are themselves a unit of host work; all others only wrap ops
_UNIT = re.compile(r"Optimizer\.|enumerate\(DataLoader\)")
_WRAPPER = re.compile(
    r"ProfilerStep|## |autograd::engine::evaluate_function|DistributedDataParallel\.forward$|\[param\|"
)


def sort_host_events(trace: TimelineTrace) -> IntArray:
    """Rows of host events by start; an event comes before what it encloses."""
    rows = trace.find_rows(*HOST_KINDS)
    start, duration, kind = (trace.events[column][rows] for column in ("start", "duration", "kind"))
    return rows[np.lexsort((kind == Kind.RUNTIME, -duration, start))]


def number_thread_keys(trace: TimelineTrace) -> IntArray:
    """A number for the process and thread of every event; traces write the same one as a number and as text."""
    keys: dict[tuple[str, str], int] = {}
    number = np.array([keys.setdefault((str(p), str(t)), len(keys)) for p, t in trace.tracks], dtype=np.int64)
    return np.asarray(number[trace.events["track"]])


def number_threads(trace: TimelineTrace, marker: IntArray, host: IntArray, usual: IntArray) -> IntArray:
    """Host threads by number: the marked one first, else that with most of the `usual` events, then by first event.
    Devices get -1."""
    thread = np.full(len(trace.events), -1, dtype=np.int64)
    if not len(usual):
        return thread
    event_key = number_thread_keys(trace)
    marked = len(marker) and trace.events["kind"][marker[0]] in HOST_KINDS
    first = int(event_key[marker[0]]) if marked else int(np.bincount(event_key[usual]).argmax())
    keys, appears = np.unique(event_key[host], return_index=True)
    order = keys[np.argsort(appears)]
    number = np.full(int(event_key.max()) + 1, -1, dtype=np.int64)
    number[[first, *order[order != first].tolist()]] = np.arange(len(order))
    thread[host] = number[event_key[host]]
    return thread


def build_op_tree(trace: TimelineTrace, thread: IntArray, host: IntArray) -> tuple[IntArray, IntArray]:
    """Parent and scope of every host event, by containment in time on its thread."""
    parent, scope = (np.full(len(trace.events), -1, dtype=np.int64) for _ in range(2))
    if not len(host):
        return parent, scope
    host = host[np.argsort(thread[host], kind="stable")]
    start, kind = trace.events["start"][host], trace.events["kind"][host]
    encloses = kind != Kind.RUNTIME
    above = _find_enclosing(thread[host], start, start + trace.events["duration"][host], encloses)
    allowed = np.array([_can_be_scope(name) for name in trace.names])
    unit = np.zeros(len(host), dtype=np.bool_)
    unit[encloses] = allowed[trace.events["name"][host[encloses]], kind[encloses]]
    top = _find_outermost(above, unit)
    parent[host], scope[host] = np.where(above >= 0, host[above], -1), np.where(top >= 0, host[top], -1)
    return parent, scope


def _find_enclosing(thread: IntArray, start: IntArray, end: IntArray, encloses: BoolArray) -> IntArray:
    """The place of the innermost event around each one, -1 for none; they are sorted by thread, then start.

    It is the last one before that has not ended. Whoever looks for it at an event that has ended goes on from where
    that one's own search has come to, so that the ways double and thousands of children take no longer than a few.
    """
    places = np.arange(len(start))
    before = np.concatenate(([-1], np.maximum.accumulate(np.where(encloses, places, -1))[:-1]))
    above = np.where((before >= 0) & (thread[before] == thread), before, -1)
    open_ = places[above >= 0]
    while len(open_):
        open_ = open_[end[above[open_]] <= start[open_]]
        above[open_] = above[above[open_]]
        open_ = open_[above[open_] >= 0]
    return above


def _find_outermost(above: IntArray, unit: BoolArray) -> IntArray:
    """The outermost unit among each event and those around it; -1 for none."""
    top, beyond = np.where(unit, np.arange(len(above)), -1), above
    while (beyond >= 0).any():
        higher = np.where(beyond >= 0, top[beyond], -1)
        top = np.where(higher >= 0, higher, top)
        beyond = np.where(beyond >= 0, beyond[beyond], -1)
    return top


def _can_be_scope(name: str) -> tuple[bool, bool]:
    """Whether an op, and whether an annotation, of this name is a unit of host work rather than a wrapper of some."""
    unit = bool(_UNIT.match(name))
    return unit or not _WRAPPER.match(name), unit


_MOST_SHARED = 0.01  # share of the calls whose correlation a call of another process has too: fewer are damage


def stream_numbers(trace: TimelineTrace) -> IntArray:
    """Streams by number, in the order of device and stream; -1 for what is no kernel, copy or memset. Files that
    somebody put together have the same device and stream under several processes: these are several."""
    numbers = np.full(len(trace.events), -1, dtype=np.int64)
    device = trace.find_rows(*DEVICE_KINDS)
    key = np.zeros(len(device), dtype=np.int64)
    for column in (trace.events["device"][device], trace.events["stream"][device], number_processes(trace, device)):
        values, number = np.unique(column, return_inverse=True)
        key = key * len(values) + number.reshape(-1)
    numbers[device] = np.unique(key, return_inverse=True)[1].reshape(-1)
    return numbers


def number_processes(trace: TimelineTrace, rows: IntArray) -> IntArray:
    """A number for the process of each of these events (of a kernel usually that of its device)."""
    _, number = np.unique([str(process) for process, _ in trace.tracks], return_inverse=True)
    return np.asarray(number.reshape(-1)[trace.events["track"][rows]])


def find_launches(trace: TimelineTrace) -> IntArray:
    """The runtime call of every kernel, copy and memset, by correlation; -1 for none. A zero that several calls have is
    none. Rejects calls of several processes that have the same correlations."""
    launch = np.full(len(trace.events), -1, dtype=np.int64)
    calls, device = trace.find_rows(Kind.RUNTIME), trace.find_rows(*DEVICE_KINDS)
    least = 1 if np.count_nonzero(trace.events["correlation"][calls] == 0) > 1 else 0
    calls = calls[trace.events["correlation"][calls] >= least]
    order = np.argsort(trace.events["correlation"][calls], kind="stable")
    _check_processes(trace, calls[order])
    caller = find_rows(trace.events["correlation"][calls][order], calls[order], trace.events["correlation"][device])
    launch[device] = np.where(trace.events["correlation"][device] >= least, caller, -1)
    return launch


def _check_processes(trace: TimelineTrace, calls: IntArray) -> None:
    """Rejects ranks that somebody put together in one file: each process counts its calls (here in the order of their
    correlations) from the begin, so that nobody knows which of them launched a kernel."""
    process = number_processes(trace, calls)
    same = trace.events["correlation"][calls][1:] == trace.events["correlation"][calls][:-1]
    shared = int((same & (process[1:] != process[:-1])).sum())
    if shared > _MOST_SHARED * len(calls):
        names = sorted({str(trace.tracks[track][0]) for track in np.unique(trace.events["track"][calls]).tolist()})
        raise TraincastError(
            f"'{trace.path}' holds calls of {len(names)} processes ({escape_text(', '.join(names))[:80]}) with the "
            "same "
            "correlations; give each of them a file of its own"
        )


def find_previous_launched(trace: TimelineTrace, launch: IntArray) -> IntArray:
    """For a kernel without a call the last one before it on its stream that has one: its own call was lost (old
    profilers do not record those of the driver, by which Triton launches). -1 for what comes before all others of its
    stream, which was launched before the trace, and for all kernels with a call."""
    device = trace.find_rows(*DEVICE_KINDS)
    stream = stream_numbers(trace)[device]
    order = np.lexsort((trace.events["start"][device], stream))
    rows, stream = device[order], stream[order]
    called = launch[rows] >= 0
    place = np.maximum.accumulate(np.where(called, np.arange(len(rows)), -1)) if len(rows) else order
    known = ~called & (place >= 0) & (stream[place] == stream)
    before = np.full(len(trace.events), -1, dtype=np.int64)
    before[rows[known]] = rows[place[known]]
    return before


def find_rows(sorted_keys: IntArray, order: IntArray, wanted: IntArray) -> IntArray:
    """The row (through `order`) of each wanted key, or -1. Of equal keys the first row counts."""
    if not len(sorted_keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == wanted, order[place], -1)


_SAME_MOMENT_NS, _FEW = 1_000, 0.01  # what clocks in microseconds round, and a share of kernels that is no pattern
_LEAST_SEEN = 3  # calls or kernels that have to say the same
_USUAL_DELAY_NS, _LATE_NS = 10_000, 60_000  # from a call to its kernel on an idle device; no device takes so long
_IDLE_NS = 20_000  # before a kernel: with work in its queue no device idles so long (17 us were seen on MI300X)
_SHORTEST = 0.05  # share of delays that may be shorter by chance
_LEAST_LAUNCHES = 20  # of fewer the shortest delay may be a long one
_DEVICE_SYNCHRONIZE = re.compile(r"(?:cuda|hip)DeviceSynchronize")
_STREAM_SYNCHRONIZE = re.compile(r"(?:cuda|hip)StreamSynchronize")


def align_device_clock(trace: TimelineTrace, launch: IntArray) -> tuple[TimelineTrace, int, str]:
    """The trace with its device's events moved to where the host's clock allows them, by how many nanoseconds, and what
    to say of it ("" where the clocks agree, or where nothing tells). `launch` is the call of every kernel."""
    early, late = _find_early_starts(trace, launch), _find_late_ends(trace, launch)
    if early and late:
        return trace, 0, (
            f"kernels begin up to {1e-3 * early:.1f} us before their calls, and others end {1e-3 * late:.1f} us after "
            "calls that waited for them: the clocks of host and device drift, and reasons for idle time, launch "
            "delays and what-ifs are off with them"
        )  # fmt: skip
    why = (
        "kernels begin before the calls that launched them" if early else "kernels end after calls that waited for them"
    )
    shift = early - late
    if not shift:
        shift, why = -_find_least_delay(trace, launch), "no kernel begins soon after its call, even on an idle device"
    if not shift:
        return trace, 0, ""
    events = trace.events.copy()
    events["start"][trace.find_rows(*DEVICE_KINDS, Kind.DEVICE_ANNOTATION)] += shift
    later = "later" if shift > 0 else "earlier"
    said = (
        f"the clocks of host and device differ by {1e-3 * abs(shift):.1f} us or more ({why}): kernels are put that "
        f"much {later}; reasons for idle time, launch delays and what-ifs are as good as that"
    )
    return replace(trace, events=events), shift, said


def _find_early_starts(trace: TimelineTrace, launch: IntArray) -> int:
    """Nanoseconds by which kernels begin before their calls at most; 0 where only a few do."""
    rows = np.flatnonzero(launch >= 0)
    early = trace.events["start"][launch[rows]] - trace.events["start"][rows]
    ahead = early[early > _SAME_MOMENT_NS]
    return _find_most(ahead) if len(ahead) > _FEW * len(rows) else 0


def _find_most(values: IntArray) -> int:
    """The largest but for stray ones."""
    return int(np.quantile(values, 1 - _FEW))


def _find_late_ends(trace: TimelineTrace, launch: IntArray) -> int:
    """Nanoseconds by which work ends after a synchronisation that waited for it: of the device, or of a stream where
    the same op had put a copy on it just before. 0 where only a few do."""
    excess = np.concatenate([_find_device_excess(trace, launch), _find_copy_excess(trace, launch)])
    behind = excess[excess > _SAME_MOMENT_NS]
    return _find_most(behind) if len(behind) >= max(_LEAST_SEEN, 0.5 * len(excess)) else 0


def _find_calls(trace: TimelineTrace, pattern: re.Pattern[str]) -> IntArray:
    named = np.array([bool(pattern.match(name)) for name in trace.names], dtype=np.bool_)
    rows = np.flatnonzero((trace.events["kind"] == Kind.RUNTIME) & named[trace.events["name"]])
    return rows[np.argsort(trace.events["start"][rows], kind="stable")]


def _find_device_excess(trace: TimelineTrace, launch: IntArray) -> IntArray:
    """For each synchronisation of the device how long after its return the last work goes on that was launched before
    it; negative where it had ended."""
    calls, rows = _find_calls(trace, _DEVICE_SYNCHRONIZE), np.flatnonzero(launch >= 0)
    rows = rows[np.argsort(trace.events["start"][launch[rows]], kind="stable")]
    if not len(calls) or not len(rows):
        return np.empty(0, dtype=np.int64)
    ends = np.maximum.accumulate((trace.events["start"] + trace.events["duration"])[rows])
    before = np.searchsorted(trace.events["start"][launch[rows]], trace.events["start"][calls])
    known = before > 0
    returned = (trace.events["start"] + trace.events["duration"])[calls]
    excess: IntArray = ends[before[known] - 1] - returned[known]
    return excess


def _find_copy_excess(trace: TimelineTrace, launch: IntArray) -> IntArray:
    """Likewise for synchronisations of a stream and the copy that their thread launched last before."""
    calls = _find_calls(trace, _STREAM_SYNCHRONIZE)
    copies = np.flatnonzero((trace.events["kind"] == Kind.MEMCPY) & (launch >= 0))
    launched = np.flatnonzero(launch >= 0)
    excess = []
    for thread in np.unique(trace.events["track"][calls]).tolist():
        mine = launched[trace.events["track"][launch[launched]] == thread]
        mine = mine[np.argsort(trace.events["start"][launch[mine]], kind="stable")]
        own = calls[trace.events["track"][calls] == thread]
        place = np.searchsorted(trace.events["start"][launch[mine]], trace.events["start"][own]) - 1
        last, own = mine[place[place >= 0]], own[place >= 0]
        copied = np.isin(last, copies)
        ends = trace.events["start"] + trace.events["duration"]
        excess.append(ends[last[copied]] - ends[own[copied]])
    return np.concatenate(excess) if excess else np.empty(0, dtype=np.int64)


def _find_least_delay(trace: TimelineTrace, launch: IntArray) -> int:
    """Nanoseconds from a call to its kernel that no device takes: of kernels before which the device was idle, so that
    nothing but their calls was in their way, the shortest less the usual; 0 where some begin soon."""
    device = trace.find_rows(*DEVICE_KINDS)
    device = device[np.argsort(trace.events["start"][device], kind="stable")]
    if len(device) < _LEAST_LAUNCHES:
        return 0
    begin, end = trace.events["start"][device], (trace.events["start"] + trace.events["duration"])[device]
    idle = np.append(0, begin[1:] - np.maximum.accumulate(end)[:-1])
    calls = launch[device]
    alone = np.bincount(calls[calls >= 0], minlength=len(launch))[np.maximum(calls, 0)] == 1  # no node of a graph
    chosen = (calls >= 0) & alone & (idle > _IDLE_NS)
    if chosen.sum() < _LEAST_LAUNCHES:
        return 0
    least = int(np.quantile(begin[chosen] - trace.events["start"][calls[chosen]], _SHORTEST))
    return least - _USUAL_DELAY_NS if least > _LATE_NS else 0
