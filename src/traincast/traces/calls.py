"""Kernels and the runtime calls that launched them, by stream; kernels whose call is not in the trace."""

from __future__ import annotations

import numpy as np

from traincast.traces.events import DEVICE_KINDS, Kind, TimelineTrace
from traincast.traces.execution import find_rows
from traincast.utils.arrays import IntArray
from traincast.utils.errors import TraincastError, escape_text

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
