"""What marks the begin of a step in a timeline."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import numpy as np

from traincast.traces.events import DEVICE_KINDS, HOST_KINDS, Kind, TimelineTrace
from traincast.utils.arrays import BoolArray, IntArray, group_positions
from traincast.utils.errors import TraincastError, escape_text, make_unknown_error

STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
"""The profiler's own markers."""

_OPTIMIZER = re.compile(r"Optimizer\.step#")
# annotations that call themselves steps, such as those of vLLM's and SGLang's workers
_CALLED_STEP = re.compile(
    r"(?:^|[^a-z.])(?:step|iteration|iter)(?:[^a-z]|$)|execute_(?:context|generation|model|new)|train(?:ing)?_batch",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")
_LEAST_STEPS = 3  # of annotations
_MOST_CALLS = 0.9  # share of the runtime calls of a trace that have to be between the first and the last of them
_MOST_TIME = 0.5  # share of that stretch for which they last


def mask_numbers(name: str) -> str:
    """A name with "#" for every number in it.

    >>> without_numbers("execute_context_0(0)_generation_8(8)")
    'execute_context_#(#)_generation_#(#)'
    """
    return _NUMBER.sub("#", name)


def find_marker_rows(trace: TimelineTrace, marker: str = "") -> IntArray:
    """The ops and annotations at which steps begin, in order: those called `marker` ("Name#..." counts as "Name", "*"
    stands for anything), or the profiler's own; where it made none, the steps of the optimizer that has most of them,
    if it has two, else annotations that call themselves steps and make up most of the trace. Where nothing of the host
    was recorded, what the profiler put on the devices' tracks for its annotations counts."""
    host = np.isin(trace.events["kind"], HOST_KINDS).any()
    annotation = Kind.ANNOTATION if host else Kind.DEVICE_ANNOTATION
    kinds = np.isin(trace.events["kind"], (Kind.OP, annotation))
    if marker:
        rows = _filter_by_kind(trace, _find_named(trace, [_is_marker(name, marker) for name in trace.names]), kinds)
        if len(rows) < 2:
            names = {trace.names[name] for name in trace.events["name"][trace.events["kind"] == annotation]}
            raise make_unknown_error(
                "step marker", marker, sorted(names), "Name an annotation or op that occurs at least twice."
            )
        return rows
    rows = _filter_by_kind(trace, _find_named(trace, [bool(STEP.match(name)) for name in trace.names]), kinds)
    _check_one_process(trace, rows)
    if not len(rows):
        rows = _find_optimizer_steps(trace, kinds)
    return rows if len(rows) else _find_annotated_steps(trace, annotation)


def _filter_by_kind(trace: TimelineTrace, rows: IntArray, kinds: BoolArray) -> IntArray:
    """Those of these rows that are of the kinds that count. Annotations on devices come once for every stream on which
    they have kernels: those of the stream that has most of them."""
    rows = rows[kinds[rows]]
    if not len(rows) or trace.events["kind"][rows[0]] != Kind.DEVICE_ANNOTATION:
        return rows
    tracks = trace.events["track"][rows]
    chosen: IntArray = rows[tracks == np.bincount(tracks).argmax()]
    return chosen


def _check_one_process(trace: TimelineTrace, rows: IntArray) -> None:
    """Rejects steps of several processes: ranks that somebody put together in one file."""
    processes = sorted({str(trace.tracks[track][0]) for track in np.unique(trace.events["track"][rows]).tolist()})
    if len(processes) > 1:
        named = escape_text(", ".join(processes))[:80]
        raise TraincastError(
            f"'{trace.path}' holds steps of {len(processes)} processes ({named}); give each of them a file of its own"
        )


def _is_marker(name: str, marker: str) -> bool:
    return name == marker or name.startswith(f"{marker}#") or ("*" in marker and fnmatchcase(name, marker))


def _find_named(trace: TimelineTrace, chosen: list[bool]) -> IntArray:
    rows = np.flatnonzero(np.array(chosen, dtype=np.bool_)[trace.events["name"]])
    return rows[np.argsort(trace.events["start"][rows], kind="stable")]


def _find_optimizer_steps(trace: TimelineTrace, kinds: BoolArray) -> IntArray:
    rows = _filter_by_kind(trace, _find_named(trace, [bool(_OPTIMIZER.match(name)) for name in trace.names]), kinds)
    if len(rows):
        numbers = trace.events["name"][rows]
        rows = rows[numbers == np.bincount(numbers).argmax()]
    return rows if len(rows) > 1 else rows[:0]


def _find_annotated_steps(trace: TimelineTrace, annotation: Kind) -> IntArray:
    """Annotations of one thread, alike but for numbers, that call themselves steps: of several the longest. They follow
    each other, and nearly all runtime calls are between the first and the last."""
    rows = _find_named(trace, [bool(_CALLED_STEP.search(name)) for name in trace.names])
    rows = rows[trace.events["kind"][rows] == annotation]
    patterns: dict[str, int] = {}
    pattern = np.array([patterns.setdefault(mask_numbers(name), len(patterns)) for name in trace.names])
    groups = group_positions(pattern[trace.events["name"][rows]] * len(trace.tracks) + trace.events["track"][rows])
    fitting = [rows[places] for _, places in groups if _make_up(trace, rows[places])]
    return max(fitting, key=lambda steps: int(trace.events["duration"][steps].sum()), default=rows[:0])


def _make_up(trace: TimelineTrace, steps: IntArray) -> bool:
    """Whether these annotations, in order, are what a trace is made of."""
    start, length = trace.events["start"][steps], trace.events["duration"][steps]
    if len(steps) < _LEAST_STEPS or (start[1:] < (start + length)[:-1]).any():
        return False
    on_device = trace.events["kind"][steps[0]] == Kind.DEVICE_ANNOTATION
    calls = trace.events["start"][trace.find_rows(*(DEVICE_KINDS if on_device else (Kind.RUNTIME,)))]
    span = int(start[-1] + length[-1] - start[0])
    inside = np.count_nonzero((calls >= start[0]) & (calls <= start[0] + span))
    return bool(inside >= _MOST_CALLS * len(calls) and length.sum() >= _MOST_TIME * span)
