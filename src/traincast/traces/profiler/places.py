"""Device time by the module and by the annotation under which kernels were launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.markers import STEP, mask_numbers
from traincast.traces.profiler.kernels import find_kernels_in_steps
from traincast.traces.tree import number_thread_keys
from traincast.utils.arrays import IntArray

_MANY = 8  # names that differ in numbers only: more of them are shown as one


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """A module or an annotation: how often it ran, and the kernels launched inside of it; seconds of all steps.

    `host` is the host's time inside, `kernels` and `device` count those launched inside, what is deeper included;
    `own` leaves out what another place of the same kind inside of it launched.
    """

    name: str
    count: int
    host: float
    kernels: int
    device: float
    own: float


def make_module_rows(linked: Linked) -> tuple[PlaceRow, ...]:
    """Forward passes of `nn.Module`s, those with most device time first; nothing where the trace has none."""
    return _make_place_rows(linked, linked.trace.find_rows(Kind.MODULE), linked.trace.names)


def make_annotation_rows(linked: Linked) -> tuple[PlaceRow, ...]:
    """Annotations (`record_function`, an optimizer's steps), without the profiler's own step markers. Many that differ
    in numbers only are one."""
    rows, names = linked.trace.find_rows(Kind.ANNOTATION), linked.trace.names
    marks = np.array([bool(STEP.match(name)) for name in names])
    rows = rows[~marks[linked.events["name"][rows]]]
    alike = Counter(mask_numbers(names[number]) for number in np.unique(linked.events["name"][rows]).tolist())
    return _make_place_rows(linked, rows, [p if alike[p := mask_numbers(name)] > _MANY else name for name in names])


def _make_place_rows(linked: Linked, rows: IntArray, names: Sequence[str]) -> tuple[PlaceRow, ...]:
    """Rows of one kind by these names of events. What is launched between begin and end of a place on its thread is
    inside of it."""
    if not len(rows):
        return ()
    kernels = find_kernels_in_steps(linked)
    kernels = kernels[linked.launch[kernels] >= 0]
    calls = linked.launch[kernels]
    known: dict[str, int] = {}
    numbers = np.array([known.setdefault(name, len(known)) for name in names])[linked.events["name"][rows]]
    used, number = np.unique(numbers, return_inverse=True)
    number, labels = number.reshape(-1), list(known)
    totals = _PlaceTotals(len(used))
    threads = number_thread_keys(linked.trace)
    for thread in np.unique(threads[rows]).tolist():
        mine = threads[rows] == thread
        totals.add_thread(linked, rows[mine], number[mine], kernels[threads[calls] == thread])
    return tuple(
        PlaceRow(
            name=labels[int(used[i])], count=int(totals.count[i]), host=1e-9 * float(totals.host[i]),
            kernels=int(totals.kernels[i]), device=1e-9 * float(totals.device[i]), own=1e-9 * float(totals.own[i]),
        )
        for i in np.argsort(-totals.device, kind="stable").tolist()
    )  # fmt: skip


class _PlaceTotals:
    """Sums by the number of a name, nanoseconds."""

    def __init__(self, names: int) -> None:
        self.count, self.kernels = (np.zeros(names, dtype=np.int64) for _ in range(2))
        self.host, self.device, self.own = (np.zeros(names) for _ in range(3))

    def add_thread(self, linked: Linked, places: IntArray, number: IntArray, kernels: IntArray) -> None:
        """The places of one thread and the kernels that it launched."""
        order = np.lexsort((-linked.events["duration"][places], linked.events["start"][places]))
        places, number = places[order], number[order]
        start, end = linked.events["start"][places], linked.end[places]
        at = linked.events["start"][linked.launch[kernels]]
        by_call = np.argsort(at, kind="stable")
        lengths = linked.events["duration"][kernels][by_call]
        spent = np.concatenate(([0], np.cumsum(lengths)))
        first, last = (np.searchsorted(at[by_call], moment) for moment in (start, end))
        inside = spent[last] - spent[first]
        outermost = _find_outermost_by_name(number, start, end)
        np.add.at(self.count, number, 1)
        np.add.at(self.host, number[outermost], (end - start)[outermost])
        np.add.at(self.kernels, number[outermost], (last - first)[outermost])
        np.add.at(self.device, number[outermost], inside[outermost])
        np.add.at(self.own, number, inside - _sum_children(start, end, inside))


def _find_outermost_by_name(number: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """Places that no other of the same name encloses, so that nothing counts twice; `start` is sorted."""
    until: dict[int, int] = {}
    chosen = []
    for i, (name, begin, stop) in enumerate(zip(number.tolist(), start.tolist(), end.tolist(), strict=True)):
        if begin >= until.get(name, begin):
            chosen.append(i)
            until[name] = stop
    return np.array(chosen, dtype=np.int64)


def _sum_children(start: IntArray, end: IntArray, inside: IntArray) -> IntArray:
    """What the places directly inside of each one have; `start` is sorted, the enclosing place first."""
    children = np.zeros(len(start), dtype=np.int64)
    stack: list[tuple[int, int]] = []
    for i, (begin, stop, value) in enumerate(zip(start.tolist(), end.tolist(), inside.tolist(), strict=True)):
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if stack:
            children[stack[-1][1]] += value
        stack.append((stop, i))
    return children
