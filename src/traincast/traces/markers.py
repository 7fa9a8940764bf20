"""What marks the begin of a step in a timeline."""

from __future__ import annotations

import re

import numpy as np

from traincast.arrays import IntArray
from traincast.errors import unknown
from traincast.traces.events import Kind, TimelineTrace

STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
"""The profiler's own markers."""

_OPTIMIZER = re.compile(r"Optimizer\.step#")


def marker_rows(trace: TimelineTrace, marker: str = "") -> IntArray:
    """The ops and annotations at which steps begin, in order: those called `marker` ("Name#..." counts as "Name"), or
    the profiler's own; where it made none, the steps of the optimizer that has most of them, if it has two."""
    kinds = np.isin(trace.events["kind"], (Kind.OP, Kind.ANNOTATION))
    if marker:
        rows = _named(trace, [name == marker or name.startswith(f"{marker}#") for name in trace.names])
        rows = rows[kinds[rows]]
        if len(rows) < 2:
            names = {trace.names[name] for name in trace.events["name"][trace.events["kind"] == Kind.ANNOTATION]}
            raise unknown("step marker", marker, sorted(names), "Name an annotation or op that occurs at least twice.")
        return rows
    rows = _named(trace, [bool(STEP.match(name)) for name in trace.names])
    rows = rows[kinds[rows]]
    return rows if len(rows) else _optimizer_steps(trace)


def _named(trace: TimelineTrace, chosen: list[bool]) -> IntArray:
    rows = np.flatnonzero(np.array(chosen, dtype=np.bool_)[trace.events["name"]])
    return rows[np.argsort(trace.events["start"][rows], kind="stable")]


def _optimizer_steps(trace: TimelineTrace) -> IntArray:
    rows = _named(trace, [bool(_OPTIMIZER.match(name)) for name in trace.names])
    if len(rows):
        numbers = trace.events["name"][rows]
        rows = rows[numbers == np.bincount(numbers).argmax()]
    return rows if len(rows) > 1 else rows[:0]
