"""Kernels by name, module and annotation, streams, and how far the host runs ahead of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.traces.breakdown import Intervals
from traincast.traces.calls import number_thread_keys
from traincast.traces.events import Kind
from traincast.traces.link import Linked
from traincast.traces.markers import STEP, mask_numbers
from traincast.traces.slowdowns import LaunchQueue
from traincast.utils.arrays import FloatArray, IntArray, group_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All kernels of one name in the steps of a trace; seconds. `share` is that of the time of all kernels."""

    name: str
    family: str
    count: int
    total: float
    mean: float
    shortest: float
    longest: float
    share: float


def make_kernel_rows(linked: Linked) -> tuple[KernelRow, ...]:
    """Kernels, copies and memsets by name, those with most time first."""
    rows = find_kernels_in_steps(linked)
    names, group = np.unique(linked.events["name"][rows], return_inverse=True)
    group = group.reshape(-1)
    seconds = 1e-9 * linked.events["duration"][rows]
    count, total = np.bincount(group, minlength=len(names)), np.bincount(group, seconds, minlength=len(names))
    low, high = np.full(len(names), np.inf), np.zeros(len(names))
    np.minimum.at(low, group, seconds)
    np.maximum.at(high, group, seconds)
    whole = float(total.sum()) or 1.0
    return tuple(
        KernelRow(
            name=linked.trace.names[int(names[i])],
            family=linked.find_family(int(names[i])),
            count=int(count[i]),
            total=float(total[i]),
            mean=float(total[i] / count[i]),
            shortest=float(low[i]),
            longest=float(high[i]),
            share=float(total[i] / whole),
        )
        for i in np.argsort(-total, kind="stable").tolist()
    )


def find_kernels_in_steps(linked: Linked) -> IntArray:
    """Kernels, copies and memsets that belong to a step, by start."""
    rows: IntArray = linked.device[linked.step[linked.device] >= 0]
    return rows


_MOST_POINTS = 1_000  # of a curve: the highest of as many stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """One stream in all steps, seconds: busy, and idle from its first kernel to its last; `gap_longest` is the longest
    time between two of its kernels. `bytes` are those of its copies, `bytes_per_second` while they ran."""

    device: int
    stream: int
    kernels: int
    total: float
    idle: float
    gap_longest: float
    bytes: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePoint:
    """The most launches that waited behind a call in a stretch of time, seconds after the first step began."""

    seconds: float
    waiting: int


def make_stream_rows(linked: Linked) -> tuple[StreamRow, ...]:
    """The streams of a trace, the busiest first."""
    rows = find_kernels_in_steps(linked)
    made = [_make_row(linked, rows[places]) for _, places in group_positions(linked.stream[rows])]
    return tuple(sorted(made, key=lambda row: -row.total))


def _make_row(linked: Linked, rows: IntArray) -> StreamRow:
    events = linked.events
    busy = Intervals.from_spans(events["start"][rows], linked.end[rows])
    gaps = busy.start[1:] - busy.end[:-1]
    copies = rows[(events["kind"][rows] == Kind.MEMCPY) & (events["bytes"][rows] > 0)]
    moved, took = int(events["bytes"][copies].sum()), 1e-9 * float(events["duration"][copies].sum())
    return StreamRow(
        device=int(events["device"][rows[0]]), stream=int(events["stream"][rows[0]]), kernels=len(rows),
        total=1e-9 * busy.total, idle=1e-9 * float(gaps.sum()), gap_longest=1e-9 * float(gaps.max(initial=0)),
        bytes=moved, bytes_per_second=moved / took if took else 0.0,
    )  # fmt: skip


def make_queue_points(linked: Linked, queue: LaunchQueue) -> tuple[QueuePoint, ...]:
    """How many launches waited, by the most of each of a thousand stretches; nothing where none was recorded."""
    calls = np.flatnonzero(linked.is_launch & (linked.step >= 0))
    if not len(calls) or not linked.launched:
        return ()
    calls = calls[np.argsort(linked.events["start"][calls], kind="stable")]
    edges = np.unique(np.linspace(0, len(calls), min(len(calls), _MOST_POINTS) + 1).astype(np.int64))
    origin = linked.steps[0].start
    return tuple(
        QueuePoint(
            seconds=1e-9 * (int(linked.events["start"][calls[low]]) - origin),
            waiting=int(queue.waiting[calls[low:high]].max()),
        )
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    )


_SHORT_NS = 10_000  # about what a launch takes its host: shorter kernels cannot keep the device busy


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRow:
    """One step. `waiting_*` are launches in the queue before each call, `delay_*` seconds from the begin of a call to
    that of its kernel, `held` the calls that a full queue held. `short` are kernels below 10 us, `short_seconds` their
    time. `late` are kernels that waited longer than they ran."""

    number: int
    calls: int
    kernels: int
    waiting_mean: float
    waiting_most: int
    held: int
    delay_median: float
    delay_p95: float
    short: int
    short_seconds: float
    late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """Launches of one graph, told by how its first node is called and by the number of its nodes; seconds in all
    steps. `idle` is the time between its nodes in which none of them ran."""

    name: str
    launches: int
    nodes: int
    device: float
    span: float
    idle: float


def make_launch_rows(linked: Linked, queue: LaunchQueue) -> tuple[LaunchRow, ...]:
    """The launches of every step; nothing where none was recorded."""
    rows = find_kernels_in_steps(linked)
    rows = rows[linked.launch[rows] >= 0]
    if not len(linked.device) or not linked.launched:
        return ()
    return tuple(
        _make_launch_row(linked, queue, step.number, rows[linked.step[rows] == index])
        for index, step in enumerate(linked.steps)
    )


def _make_launch_row(linked: Linked, queue: LaunchQueue, number: int, rows: IntArray) -> LaunchRow:
    calls = np.unique(linked.launch[rows])
    lengths = linked.events["duration"][rows]
    short = (linked.events["kind"][rows] == Kind.KERNEL) & (lengths < _SHORT_NS)
    delay = linked.events["start"][rows] - linked.events["start"][linked.launch[rows]]
    return LaunchRow(
        number=number,
        calls=len(calls),
        kernels=len(rows),
        waiting_mean=float(queue.waiting[calls].mean()) if len(calls) else 0.0,
        waiting_most=int(queue.waiting[calls].max(initial=0)),
        held=int(queue.held[calls].sum()),
        delay_median=_compute_quantile(delay, 0.5),
        delay_p95=_compute_quantile(delay, 0.95),
        short=int(short.sum()),
        short_seconds=1e-9 * float(lengths[short].sum()),
        late=int((delay > lengths).sum()),
    )


def _compute_quantile(nanoseconds: IntArray, share: float) -> float:
    return 1e-9 * float(np.quantile(nanoseconds, share)) if len(nanoseconds) else 0.0


def make_graph_rows(linked: Linked) -> tuple[GraphRow, ...]:
    """The graphs that were launched, those with most device time first."""
    rows = find_kernels_in_steps(linked)
    rows = rows[linked.launch[rows] >= 0]
    rows = rows[linked.is_graph_launch[linked.launch[rows]]]
    launched: dict[int, list[int]] = {}
    for row in rows.tolist():
        launched.setdefault(int(linked.launch[row]), []).append(row)
    found: dict[tuple[str, int], list[FloatArray]] = {}
    for nodes in launched.values():
        found.setdefault((linked.get_name(nodes[0]), len(nodes)), []).append(_sum_node_times(linked, nodes))
    totals = {key: np.sum(times, axis=0) for key, times in found.items()}
    return tuple(
        GraphRow(
            name=f"graph of {nodes} nodes that begins with {name}", launches=len(found[name, nodes]), nodes=nodes,
            device=float(device), span=float(span), idle=float(idle),
        )
        for (name, nodes), (device, span, idle) in sorted(totals.items(), key=lambda item: -item[1][0])
    )  # fmt: skip


def _sum_node_times(linked: Linked, nodes: list[int]) -> FloatArray:
    """Device seconds of the nodes, from the first one's begin to the last one's end, and without any of them."""
    start, end = linked.events["start"][nodes], linked.end[nodes]
    reached = np.maximum.accumulate(end)
    idle = float(np.maximum(start[1:] - reached[:-1], 0).sum())
    return 1e-9 * np.array([float(linked.events["duration"][nodes].sum()), float(reached[-1] - start[0]), idle])


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
