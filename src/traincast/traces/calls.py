"""Kernels and the runtime calls that launched them, by stream; kernels whose call is not in the trace."""

from __future__ import annotations

import numpy as np

from traincast.arrays import IntArray
from traincast.traces.events import DEVICE_KINDS, Kind, TimelineTrace
from traincast.traces.nodes import rows_of


def stream_numbers(trace: TimelineTrace) -> IntArray:
    """Streams by number, in the order of device and stream; -1 for what is no kernel, copy or memset."""
    numbers = np.full(len(trace.events), -1, dtype=np.int64)
    device = trace.of_kind(*DEVICE_KINDS)
    keys = np.stack([trace.events["device"][device], trace.events["stream"][device]], axis=1)
    numbers[device] = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    return numbers


def launches(trace: TimelineTrace) -> IntArray:
    """The runtime call of every kernel, copy and memset, by correlation; -1 for none."""
    launch = np.full(len(trace.events), -1, dtype=np.int64)
    calls, device = trace.of_kind(Kind.RUNTIME), trace.of_kind(*DEVICE_KINDS)
    calls = calls[trace.events["correlation"][calls] >= 0]
    order = np.argsort(trace.events["correlation"][calls], kind="stable")
    caller = rows_of(trace.events["correlation"][calls][order], calls[order], trace.events["correlation"][device])
    launch[device] = np.where(trace.events["correlation"][device] >= 0, caller, -1)
    return launch


def followed(trace: TimelineTrace, launch: IntArray) -> IntArray:
    """For a kernel without a call the last one before it on its stream that has one: its own call was lost (old
    profilers do not record those of the driver, by which Triton launches). -1 for what comes before all others of its
    stream, which was launched before the trace, and for all kernels with a call."""
    device = trace.of_kind(*DEVICE_KINDS)
    stream = stream_numbers(trace)[device]
    order = np.lexsort((trace.events["start"][device], stream))
    rows, stream = device[order], stream[order]
    called = launch[rows] >= 0
    place = np.maximum.accumulate(np.where(called, np.arange(len(rows)), -1)) if len(rows) else order
    known = ~called & (place >= 0) & (stream[place] == stream)
    before = np.full(len(trace.events), -1, dtype=np.int64)
    before[rows[known]] = rows[place[known]]
    return before
