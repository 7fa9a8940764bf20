"""Between host and device: how far the host runs ahead, how long launched work waits, short kernels, graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.traces.events import Kind
from traincast.traces.launch_queue import LaunchQueue
from traincast.traces.link import Linked
from traincast.traces.profiler.kernels import find_kernels_in_steps
from traincast.utils.arrays import FloatArray, IntArray

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
