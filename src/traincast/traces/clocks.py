"""Whether the clocks of host and device agree: no kernel begins before the call that launched it, none goes on after a
call that waited for it has returned, and one launched to an idle device begins at once."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from traincast.traces.events import DEVICE_KINDS, Kind, TimelineTrace
from traincast.utils.arrays import IntArray

_SAME_MOMENT_NS, _FEW = 1_000, 0.01  # what clocks in microseconds round, and a share of kernels that is no pattern
_LEAST_SEEN = 3  # calls or kernels that have to say the same
_USUAL_DELAY_NS, _LATE_NS = 10_000, 60_000  # from a call to its kernel on an idle device; no device takes so long
_IDLE_NS, _SHORTEST = 5_000, 0.05  # idle before a kernel; share of delays that may be shorter by chance
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
