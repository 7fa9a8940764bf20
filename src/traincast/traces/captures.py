"""CUDA graphs: which captured call every node of a launched graph comes from.

A graph is launched by one call, under which nothing says what its kernels are. While it was captured, every node was a
call inside of an op. Where these calls are in the trace, or in a trace of the capture that was given with it, they come
in the order of the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traincast.traces.calls import number_processes
from traincast.traces.events import DEVICE_KINDS, GRAPH_SHIFT, HOST_KINDS, Kind, TimelineTrace
from traincast.utils.arrays import IntArray, group_positions

LAUNCH = re.compile(r"(?:cuda|hip|cu)\w*(?:Launch|Memcpy|Memset|memcpy|memset)\w*|urEnqueue\w+|zeCommandListAppend\w+")
"""Runtime calls that put work on a stream."""
GRAPH_LAUNCH = re.compile(r"(?:cuda|hip|cu)GraphLaunch")
"""Runtime calls that put a graph on a stream."""
_BEGIN, _END = (re.compile(rf"(?:cuda|hip|cu)Stream{word}Capture") for word in ("Begin", "End"))
_JOINED = "capture"  # the process of events that came from another file


def find_captures(trace: TimelineTrace) -> IntArray:
    """For every event of the host the number of the capture that it is part of; -1 for none, for other events, and
    where a trace has nothing else."""
    number = _number_captures(trace)
    everything = (number[trace.find_rows(*HOST_KINDS, *DEVICE_KINDS)] >= 0).all()
    return np.full_like(number, -1) if everything else number


def _number_captures(trace: TimelineTrace) -> IntArray:
    number = np.full(len(trace.events), -1, dtype=np.int64)
    begins, ends = (_find_calls(trace, pattern) for pattern in (_BEGIN, _END))
    if not len(begins) or not len(ends):
        return number
    host = trace.find_rows(*HOST_KINDS)
    start, process = trace.events["start"], number_processes(trace, np.arange(len(trace.events)))
    for place, begin in enumerate(begins.tolist()):
        later = ends[(start[ends] > start[begin]) & (trace.events["track"][ends] == trace.events["track"][begin])]
        if len(later):
            inside = (start[host] >= start[begin]) & (start[host] <= start[later[0]])
            number[host[inside & (process[host] == process[begin])]] = place
    return number


def _find_calls(trace: TimelineTrace, pattern: re.Pattern[str]) -> IntArray:
    named = np.array([bool(pattern.match(name)) for name in trace.names], dtype=np.bool_)
    rows = np.flatnonzero((trace.events["kind"] == Kind.RUNTIME) & named[trace.events["name"]])
    return rows[np.argsort(trace.events["start"][rows], kind="stable")]


def only_captures(trace: TimelineTrace) -> bool:
    """Whether a trace shows how graphs were captured and launches none of them: it describes another one."""
    return bool(len(_find_calls(trace, _BEGIN))) and not launches_graphs(trace)


def launches_graphs(trace: TimelineTrace) -> bool:
    """Whether a trace launches graphs."""
    return bool(len(_find_calls(trace, GRAPH_LAUNCH)))


def join_captures(trace: TimelineTrace, captures: TimelineTrace) -> TimelineTrace:
    """A trace with what another one captured, as threads of a process of its own that ended before the trace began."""
    events = captures.events[_number_captures(captures) >= 0]
    names = {name: number for number, name in enumerate(trace.names)}
    name = np.array([names.setdefault(name, len(names)) for name in captures.names], dtype=np.int64)
    events["name"] = name[events["name"]]
    events["details"] += np.where(events["details"] > 0, len(trace.details), 0)
    events["track"] += len(trace.tracks)
    for column in ("correlation", "external", "record_function", "sequence"):  # numbers of the other run
        events[column] = -1
    events["start"] -= int((events["start"] + events["duration"]).max()) - int(trace.events["start"].min()) + 1
    return replace(
        trace,
        events=np.concatenate([trace.events, events]),
        names=tuple(names),
        details=(*trace.details, *captures.details),
        tracks=(*trace.tracks, *((_JOINED, f"{process} {thread}") for process, thread in captures.tracks)),
    )


def find_authors(trace: TimelineTrace, launch: IntArray, capture: IntArray) -> IntArray:
    """For every kernel, copy and memset the call that says what it is: that of `launch`, or for the node of a graph
    the one that was captured. Graphs of as many nodes are told apart by the order in which they were made; where that
    is not known, they stay what their launch is."""
    author = launch.copy()
    graphs = _list_graphs(trace, launch) if (capture >= 0).any() else {}
    captured = _list_captured_calls(trace, capture) if graphs else []
    for count in {len(launches[0]) for launches in graphs.values()}:
        keys = sorted(key for key, launches in graphs.items() if len(launches[0]) == count)
        told = [calls for calls in captured if len(calls) == count]
        if len(told) != len(keys):
            continue
        for key, calls in zip(keys, told, strict=True):
            for nodes in graphs[key]:
                if _agree(trace, nodes, calls):
                    author[nodes] = calls
    return author


def _list_graphs(trace: TimelineTrace, launch: IntArray) -> dict[tuple[int, ...], list[IntArray]]:
    """The nodes of every launch of each graph, in the order in which they were made. A graph is told by its number, or
    by its first launch and the names of its nodes."""
    events = trace.events
    device = trace.find_rows(*DEVICE_KINDS)
    of_graph = np.zeros(len(events), dtype=np.bool_)
    of_graph[_find_calls(trace, GRAPH_LAUNCH)] = True
    nodes = device[(launch[device] >= 0) & of_graph[launch[device]]]
    found: dict[tuple[int, ...], list[IntArray]] = {}
    seen: dict[tuple[int, ...], int] = {}
    for _, places in sorted(group_positions(launch[nodes]), key=lambda item: int(events["start"][item[0]])):
        mine = nodes[places]
        numbers = events["sequence"][mine]
        numbered = bool((numbers >= 0).all())
        mine = mine[np.argsort(numbers if numbered else events["start"][mine], kind="stable")]
        if numbered:
            key: tuple[int, ...] = (int(numbers.min()) >> GRAPH_SHIFT,)
        else:
            key = (seen.setdefault(tuple(events["name"][mine].tolist()), len(seen)),)
        found.setdefault(key, []).append(mine)
    return found


def _list_captured_calls(trace: TimelineTrace, capture: IntArray) -> list[IntArray]:
    """The calls of every capture that made a node, in order; one inside of another (of the driver, under the
    runtime's) is the same."""
    events = trace.events
    calls = np.setdiff1d(_find_calls(trace, LAUNCH), _find_calls(trace, GRAPH_LAUNCH))
    calls = calls[capture[calls] >= 0]
    calls = calls[np.argsort(events["start"][calls], kind="stable")]
    ended: dict[int, int] = {}
    kept = []
    for row, track, start in zip(calls.tolist(), events["track"][calls].tolist(), events["start"][calls].tolist(),
                                 strict=True):  # fmt: skip
        if start >= ended.get(track, start):
            ended[track] = start + int(events["duration"][row])
            kept.append(row)
    rows = np.array(kept, dtype=np.int64)
    return [rows[places] for _, places in group_positions(capture[rows])]


def _agree(trace: TimelineTrace, nodes: IntArray, calls: Sequence[int] | IntArray) -> bool:
    """Whether every copy among the nodes of a graph was captured as one."""
    copies = np.array(["emcpy" in name for name in trace.names])[trace.events["name"][calls]]
    return bool(copies[trace.events["kind"][nodes] == Kind.MEMCPY].all())
