"""What marks the begin of a step in a timeline."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import numpy as np

from traincast.arrays import IntArray, grouped
from traincast.errors import TraincastError, printable, unknown
from traincast.traces.events import Kind, TimelineTrace

STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
"""The profiler's own markers."""

_OPTIMIZER = re.compile(r"Optimizer\.step#")
# annotations that call themselves steps, such as those of vLLM's and SGLang's workers
_CALLED_STEP = re.compile(
    r"(?:^|[^a-z.])(?:step|iteration|iter)(?:[^a-z]|$)|execute_(?:context|generation|model)|train(?:ing)?_batch",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")
_LEAST_STEPS = 3  # of annotations
_MOST_CALLS = 0.9  # share of the runtime calls of a trace that have to lie between the first and the last of them
_MOST_TIME = 0.5  # share of that stretch for which they last


def without_numbers(name: str) -> str:
    """A name with "#" for every number in it.

    >>> without_numbers("execute_context_0(0)_generation_8(8)")
    'execute_context_#(#)_generation_#(#)'
    """
    return _NUMBER.sub("#", name)


def marker_rows(trace: TimelineTrace, marker: str = "") -> IntArray:
    """The ops and annotations at which steps begin, in order: those called `marker` ("Name#..." counts as "Name", "*"
    stands for anything), or the profiler's own; where it made none, the steps of the optimizer that has most of them,
    if it has two, else annotations that call themselves steps and make up most of the trace."""
    kinds = np.isin(trace.events["kind"], (Kind.OP, Kind.ANNOTATION))
    if marker:
        rows = _named(trace, [_is_marker(name, marker) for name in trace.names])
        rows = rows[kinds[rows]]
        if len(rows) < 2:
            names = {trace.names[name] for name in trace.events["name"][trace.events["kind"] == Kind.ANNOTATION]}
            raise unknown("step marker", marker, sorted(names), "Name an annotation or op that occurs at least twice.")
        return rows
    rows = _named(trace, [bool(STEP.match(name)) for name in trace.names])
    rows = rows[kinds[rows]]
    _of_one_process(trace, rows)
    if not len(rows):
        rows = _optimizer_steps(trace)
    return rows if len(rows) else _annotated_steps(trace)


def _of_one_process(trace: TimelineTrace, rows: IntArray) -> None:
    """Refuses steps of several processes: ranks that somebody put together in one file."""
    processes = sorted({str(trace.tracks[track][0]) for track in np.unique(trace.events["track"][rows]).tolist()})
    if len(processes) > 1:
        named = printable(", ".join(processes))[:80]
        raise TraincastError(
            f"'{trace.path}' holds steps of {len(processes)} processes ({named}); give each of them a file of its own"
        )


def _is_marker(name: str, marker: str) -> bool:
    return name == marker or name.startswith(f"{marker}#") or ("*" in marker and fnmatchcase(name, marker))


def _named(trace: TimelineTrace, chosen: list[bool]) -> IntArray:
    rows = np.flatnonzero(np.array(chosen, dtype=np.bool_)[trace.events["name"]])
    return rows[np.argsort(trace.events["start"][rows], kind="stable")]


def _optimizer_steps(trace: TimelineTrace) -> IntArray:
    rows = _named(trace, [bool(_OPTIMIZER.match(name)) for name in trace.names])
    if len(rows):
        numbers = trace.events["name"][rows]
        rows = rows[numbers == np.bincount(numbers).argmax()]
    return rows if len(rows) > 1 else rows[:0]


def _annotated_steps(trace: TimelineTrace) -> IntArray:
    """Annotations of one thread, alike but for numbers, that call themselves steps: of several the longest. They follow
    each other, and nearly all runtime calls lie between the first and the last."""
    rows = _named(trace, [bool(_CALLED_STEP.search(name)) for name in trace.names])
    rows = rows[trace.events["kind"][rows] == Kind.ANNOTATION]
    patterns: dict[str, int] = {}
    pattern = np.array([patterns.setdefault(without_numbers(name), len(patterns)) for name in trace.names])
    groups = grouped(pattern[trace.events["name"][rows]] * len(trace.tracks) + trace.events["track"][rows])
    fitting = [rows[places] for _, places in groups if _make_up(trace, rows[places])]
    return max(fitting, key=lambda steps: int(trace.events["duration"][steps].sum()), default=rows[:0])


def _make_up(trace: TimelineTrace, steps: IntArray) -> bool:
    """Whether these annotations, in order, are what a trace is made of."""
    start, length = trace.events["start"][steps], trace.events["duration"][steps]
    if len(steps) < _LEAST_STEPS or (start[1:] < (start + length)[:-1]).any():
        return False
    calls = trace.events["start"][trace.of_kind(Kind.RUNTIME)]
    span = int(start[-1] + length[-1] - start[0])
    inside = np.count_nonzero((calls >= start[0]) & (calls <= start[0] + span))
    return bool(inside >= _MOST_CALLS * len(calls) and length.sum() >= _MOST_TIME * span)
