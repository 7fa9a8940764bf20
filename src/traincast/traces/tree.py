"""The tree of a timeline's host events: threads, what encloses what, and the outermost op of each."""

from __future__ import annotations

import re

import numpy as np

from traincast.traces.events import HOST_KINDS, Kind, TimelineTrace
from traincast.utils.arrays import BoolArray, IntArray

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


def number_threads(trace: TimelineTrace, marker: IntArray, host: IntArray) -> IntArray:
    """Host threads by number: the marked one first, then by first event. Devices get -1."""
    thread = np.full(len(trace.events), -1, dtype=np.int64)
    if not len(host):
        return thread
    event_key = number_thread_keys(trace)
    marked = len(marker) and trace.events["kind"][marker[0]] in HOST_KINDS
    first = int(event_key[marker[0]]) if marked else int(np.bincount(event_key[host]).argmax())
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
