"""What marks the begin of a step in a timeline, and the period of its kernels where nothing does."""

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


_PERIODS = 3  # at least this many in the trace: two alike may be two halves of one step
_SHORTEST = 4  # kernels: fewer are a loop inside of a step
_ALIKE = 0.98  # share of kernels that have to come again one period later
_EACH_ALIKE = 0.9  # the same for the kernels of every single name
_MOST_LOOKED_AT = 1 << 18  # kernels from which the period is found
_MOST_TRIED = 500  # lags


def find_periodic_rows(
    trace: TimelineTrace, thread: IntArray, scope: IntArray, launch: IntArray
) -> tuple[IntArray, int]:
    """The events at which steps begin, and the kernels of a step; none and 0 where the sequence of kernels, in the
    order of their launches, has no period.

    A step is the shortest stretch that comes again whole: every kernel, also one that it has only once, so that layers
    are no steps. Steps begin where the host of the main thread pauses longest between two ops; where no launch was
    recorded, where the device does.
    """
    rows = trace.find_rows(*DEVICE_KINDS)
    launched = rows[launch[rows] >= 0]
    rows = launched if len(launched) else rows
    start = trace.events["start"]
    # processes count their calls, so that kernels know the order of their launches without them
    issued = start[launch[rows]] if len(launched) else trace.events["correlation"][rows]
    rows = rows[np.lexsort((start[rows], issued))]
    names = np.unique(trace.events["name"][rows], return_inverse=True)[1].reshape(-1)
    period = _find_period(names)
    if not period:
        return rows[:0], 0
    if not len(launched):
        return rows[_find_longest_pause(_compute_device_pauses(trace, rows), period) :: period], period
    calls = launch[rows]
    begins = np.where(scope[calls] >= 0, scope[calls], calls)
    first = _find_first_step(trace.events["start"][begins], begins, thread[calls] == 0, period)
    return begins[first::period], period


def _find_period(names: IntArray) -> int:
    """The shortest lag at which a sequence is itself again; 0 for none."""
    looked = names[:_MOST_LOOKED_AT]
    longest = len(looked) // _PERIODS
    if longest < _SHORTEST:
        return 0
    # a random direction for every name: GEMMs of equal ones are 1, the others cancel
    phase = np.exp(2j * np.pi * np.random.default_rng(0).random(int(names.max()) + 1))
    spectrum = np.fft.fft(phase[looked], 2 * len(looked))
    lags = np.fft.ifft(np.abs(spectrum) ** 2).real[: longest + 1]
    share = lags / (len(looked) - np.arange(longest + 1))
    noise = 3 / np.sqrt(len(looked))
    candidates = np.flatnonzero(share >= _ALIKE - noise)
    for lag in candidates[candidates >= _SHORTEST][:_MOST_TRIED].tolist():
        if _is_periodic(looked, lag) and (len(looked) == len(names) or _is_periodic(names, lag)):
            return int(lag)
    return 0


def _is_periodic(names: IntArray, lag: int) -> bool:
    alike = names[:-lag] == names[lag:]
    if alike.mean() < _ALIKE:
        return False
    often = np.bincount(names) > 1
    count, equal = np.bincount(names[:-lag], minlength=len(often)), np.bincount(names[:-lag], alike, len(often))
    return bool((equal >= _EACH_ALIKE * count)[often].all())


def _find_first_step(start: IntArray, begins: IntArray, main: BoolArray, period: int) -> int:
    """The first kernel of the first whole step: where the main thread came to its op longest after the op before."""
    return _find_longest_pause(np.where(main[1:] & (begins[1:] != begins[:-1]), np.diff(start), 0), period)


def _compute_device_pauses(trace: TimelineTrace, rows: IntArray) -> IntArray:
    """For how long nothing that was launched before ran until each of these kernels but the first began."""
    start = trace.events["start"][rows]
    until = np.maximum.accumulate(start + trace.events["duration"][rows])
    pauses: IntArray = np.maximum(start[1:] - until[:-1], 0)
    return pauses


def _find_longest_pause(pause: IntArray, period: int) -> int:
    """The place in a period after the pause that is longest in the middle of all periods."""
    whole = len(pause) // period * period
    middle = np.median(pause[:whole].reshape(-1, period), axis=0)
    return int(middle.argmax()) + 1
