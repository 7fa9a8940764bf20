"""Steps of a timeline that nothing marks: the period with which its kernels come again."""

from __future__ import annotations

import numpy as np

from traincast.traces.events import DEVICE_KINDS, TimelineTrace
from traincast.utils.arrays import BoolArray, IntArray

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
