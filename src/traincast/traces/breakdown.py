"""What a measured step was made of: device active and idle and why, exposed communication, kernels, ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.arrays import IntArray
from traincast.totals import totals
from traincast.traces.intervals import Intervals
from traincast.traces.link import Linked

_SLACK_NS = 2_000  # a kernel starts this long after the call that launched it at the earliest

PARTS = (
    "compute", "exposed_comm", "host_bound", "synchronised", "event_wait", "graph_nodes", "launch_latency",
)  # fmt: skip
"""What a step is made of: attributes of `StepBreakdown` that add up to it."""


_REASONS = PARTS[2:]


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """One measured step of one rank; all times are seconds.

    `step = compute + exposed_comm + idle`. Idle is `host_bound` (the device waited for the host to launch),
    `synchronised` (likewise, while the host was inside of a synchronising call), `event_wait` (a kernel was launched in
    time but its stream waited for another), `graph_nodes` (it is a graph's node) or `launch_latency` (it was launched
    in time and simply began later). `evidence` names for each reason what most of it stands before or under.
    `by_family` and `by_op` are kernel seconds, which can exceed the time covered where streams overlap.
    """

    number: int
    step: float
    compute: float
    communication: float
    exposed_comm: float
    idle: float
    host_bound: float
    synchronised: float
    event_wait: float
    graph_nodes: float
    launch_latency: float
    evidence: dict[str, str]
    by_family: dict[str, float]
    by_op: dict[str, float]
    kernels: int

    @property
    def active(self) -> float:
        """Seconds during which the device ran anything."""
        return self.compute + self.exposed_comm

    @property
    def eg_comm(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed_comm / self.step if self.step else 0.0


def breakdown(linked: Linked) -> list[StepBreakdown]:
    """Every step of a rank's timeline."""
    device, exchanging = linked.device, linked.communicates(linked.device)
    compute, comm, everything = (_covered(linked, rows) for rows in (device[~exchanging], device[exchanging], device))
    return [_step(linked, index, compute, comm, everything) for index in range(len(linked.steps))]


def _covered(linked: Linked, rows: IntArray) -> Intervals:
    return Intervals.union(linked.events["start"][rows], linked.end[rows])


def _step(linked: Linked, index: int, compute: Intervals, comm: Intervals, everything: Intervals) -> StepBreakdown:
    step = linked.steps[index]
    inside, comm_inside = compute.clip(step.start, step.end), comm.clip(step.start, step.end)
    idle, evidence = _idle_reasons(linked, everything.gaps(step.start, step.end))
    rows = linked.device[linked.step[linked.device] == index]
    seconds = (1e-9 * linked.events["duration"][rows]).tolist()
    return StepBreakdown(
        number=step.number,
        step=step.seconds,
        compute=1e-9 * inside.total,
        communication=1e-9 * comm_inside.total,
        exposed_comm=1e-9 * comm_inside.minus(inside),
        idle=1e-9 * sum(idle.values()),
        **{reason: 1e-9 * nanoseconds for reason, nanoseconds in idle.items()},
        evidence=evidence,
        by_family=totals(zip(linked.families(rows).tolist(), seconds, strict=True)),
        by_op=totals(zip((_op_name(linked, row) for row in rows.tolist()), seconds, strict=True)),
        kernels=len(rows),
    )


def _op_name(linked: Linked, row: int) -> str:
    scope = linked.scope_of_kernel(row)
    return linked.name(scope) if scope >= 0 else "(no op)"


def _idle_reasons(linked: Linked, gaps: Intervals) -> tuple[dict[str, int], dict[str, str]]:
    """Nanoseconds of idle device time by reason, and what most of each stands before or under. What ends a gap tells
    why it was there."""
    reasons = dict.fromkeys(_REASONS, 0)
    under: dict[str, dict[str, int]] = {reason: {} for reason in reasons}
    events, device, starts = linked.events, linked.device, linked.events["start"][linked.device]
    waits = np.flatnonzero(linked.is_synchronise)
    held = Intervals.union(events["start"][waits], linked.end[waits])
    for begin, end in zip(gaps.start.tolist(), gaps.end.tolist(), strict=True):
        place = int(np.searchsorted(starts, end))
        row = int(device[place]) if place < len(device) else -1
        launch = int(linked.launch[row]) if row >= 0 else -1
        # the device could have gone on from here had it been told to
        told = min(max(int(events["start"][launch]) + _SLACK_NS, begin), end) if launch >= 0 else end
        waited = held.clip(begin, told).total
        name = linked.name(row) if row >= 0 else ""
        op = _op_name(linked, row) if row >= 0 else "the end of the step"
        for reason, nanoseconds, what in (
            ("synchronised", waited, op),
            ("host_bound", told - begin - waited, op),
            (_why_late(linked, row, launch), end - told, name),
        ):
            reasons[reason] += nanoseconds
            under[reason][what] = under[reason].get(what, 0) + nanoseconds
    return reasons, {reason: max(names, key=lambda n: names[n]) for reason, names in under.items() if reasons[reason]}


def _why_late(linked: Linked, row: int, launch: int) -> str:
    """Why a kernel that had been launched did not begin."""
    if row >= 0 and linked.waited_for[row] >= 0:
        return "event_wait"
    return "graph_nodes" if launch >= 0 and "GraphLaunch" in linked.name(launch) else "launch_latency"


@dataclass(frozen=True, kw_only=True)
class RanksBreakdown:
    """Several ranks together: shares of a step, as the study of multi-GPU training defines them.

    `eg_comm` is the least exposed communication of any rank as a share of its step; `eg_imbalance` is how much longer
    the slowest rank's embedding kernels run than the average rank's, as a share of the median step.
    """

    step: float
    eg_comm: float
    eg_imbalance: float


def over_ranks(ranks: Sequence[Sequence[StepBreakdown]]) -> RanksBreakdown:
    """The medians over steps of each rank, put together."""
    embedding = [float(np.median([step.by_family.get("embedding", 0.0) for step in steps])) for steps in ranks]
    step = float(np.median([step.step for steps in ranks for step in steps]))
    return RanksBreakdown(
        step=step,
        eg_comm=min(float(np.median([step.eg_comm for step in steps])) for steps in ranks),
        eg_imbalance=(max(embedding) - sum(embedding) / len(embedding)) / step,
    )
