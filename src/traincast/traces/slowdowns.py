"""How much longer kernels take alongside a collective than alone, measured on kernels that ran both ways."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.arguments import parse_arguments
from traincast.traces.classify import COMMUNICATION
from traincast.traces.events import Kind
from traincast.traces.intervals import Intervals
from traincast.traces.link import Linked
from traincast.utils.arrays import FloatArray, IntArray, group_positions

_BESIDE, _ALONE = 0.9, 0.05  # shares of a kernel's time with company that count as alongside a collective, and as alone
_LEAST_ALONE = 2  # one kernel alone may have been an outlier itself


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Of a kernel family: how many kernels ran alongside a collective, the time that they took over the time that the
    same kernels (equal names, equal op arguments) take alone, and the quartiles of that ratio over kernels."""

    count: int
    ratio: float
    quartiles: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """A kernel that ran alongside a collective: what it took, and what equal ones (number `group`) take alone;
    seconds."""

    family: str
    group: int
    alone: float
    took: float


def compute_slowdowns(linked: Linked) -> dict[str, Slowdown]:
    """By family, for families in which some kernel ran both ways."""
    by_family: dict[str, list[tuple[float, float]]] = {}
    for pair in find_overlapped_pairs(linked):
        by_family.setdefault(pair.family, []).append((pair.alone, pair.took))
    return {name: _summarise_pairs(pairs) for name, pairs in sorted(by_family.items())}


def find_overlapped_pairs(linked: Linked) -> list[Pair]:
    """Every kernel that ran alongside a collective and of which equal ones ran alone."""
    rows = linked.device[(linked.launch[linked.device] >= 0) & (linked.step[linked.device] >= 0)]
    family = linked.find_families(rows)
    computes = (family != COMMUNICATION) & (linked.events["kind"][rows] == Kind.KERNEL)
    beside, elsewhere = compute_overlaps(linked, rows)
    length = np.maximum(linked.events["duration"][rows].astype(np.float64), 1.0)
    alone = computes & (beside + elsewhere < _ALONE * length)
    with_comm = computes & (beside > _BESIDE * length) & (elsewhere < (1.0 - _BESIDE) * length)
    parent = linked.parent[linked.launch[rows]]
    arguments = np.where(parent >= 0, linked.events["details"][parent], 0)
    # without the sizes of all its arguments it is not known which kernels are equal
    told = np.array([_has_details(details) for details in linked.trace.details])
    alone, with_comm = alone & told[arguments], with_comm & told[arguments]
    keys = np.stack([linked.events["name"][rows], arguments], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.ravel()
    pairs = []
    for number, equal in group_positions(group):
        reference = length[equal[alone[equal]]]
        if len(reference) >= _LEAST_ALONE:
            base = 1e-9 * float(np.median(reference))
            kind = str(family[equal[0]])
            pairs += [Pair(kind, number, base, 1e-9 * float(took)) for took in length[equal[with_comm[equal]]]]
    return pairs


def _has_details(details: bytes) -> bool:
    recorded = parse_arguments(details) if details else None
    return recorded is not None and not recorded.incomplete


def compute_overlaps(linked: Linked, rows: IntArray) -> tuple[FloatArray, FloatArray]:
    """For every kernel the nanoseconds that collectives, and that anything else on other streams, ran alongside it."""
    device = linked.device
    start, end, stream = linked.events["start"][device], linked.end[device], linked.stream[device]
    communicates = linked.find_communication(device)
    first, last = linked.events["start"][rows], linked.end[rows]
    beside = _compute_covered(Intervals.from_spans(start[communicates], end[communicates]), first, last)
    computing = np.flatnonzero(~communicates)
    streams = dict(group_positions(stream[computing]))
    unions = {number: Intervals.from_spans(start[computing[at]], end[computing[at]]) for number, at in streams.items()}
    elsewhere = _compute_running_time(list(unions.values()), last) - _compute_running_time(list(unions.values()), first)
    for number, at in group_positions(linked.stream[rows]):
        if number in unions:
            elsewhere[at] -= _compute_running_time([unions[number]], last[at]) - _compute_running_time(
                [unions[number]], first[at]
            )
    return beside, elsewhere.astype(np.float64)


def _compute_running_time(unions: list[Intervals], moments: IntArray) -> IntArray:
    """Nanoseconds that streams, busy in these intervals, had run together by each moment."""
    if not unions:
        return np.zeros(len(moments), dtype=np.int64)
    starts = np.concatenate([union.start for union in unions])
    ends = np.concatenate([union.end for union in unions])
    turns = np.concatenate([starts, ends])
    order = np.argsort(turns, kind="stable")
    turns = turns[order]
    busy = np.cumsum(np.where(order < len(starts), 1, -1))  # streams from each turn to the next
    done = np.concatenate([[0], np.cumsum(busy[:-1] * np.diff(turns))])
    place = np.searchsorted(turns, moments, side="right") - 1
    since = np.where(place >= 0, done[place] + busy[place] * (moments - turns[place]), 0)
    return np.asarray(since, dtype=np.int64)


def _compute_covered(intervals: Intervals, first: IntArray, last: IntArray) -> FloatArray:
    """Nanoseconds of each span that the intervals cover."""
    if not len(intervals.start):
        return np.zeros(len(first))
    origin = int(intervals.start[0])
    moments = np.stack([intervals.start, intervals.end], axis=1).ravel() - origin
    done = np.cumsum(intervals.end - intervals.start)
    sums = np.stack([np.concatenate(([0], done[:-1])), done], axis=1).ravel()
    low, high = (np.interp(moment - origin, moments, sums) for moment in (first, last))
    return np.asarray(high - low)


def _summarise_pairs(pairs: list[tuple[float, float]]) -> Slowdown:
    alone, took = np.array(pairs).T
    low, median, high = np.quantile(took / alone, [0.25, 0.5, 0.75]).tolist()
    return Slowdown(len(pairs), float(took.sum() / alone.sum()), (low, median, high))
