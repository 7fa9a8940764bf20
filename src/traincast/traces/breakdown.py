"""What a measured step was made of: device active and idle and why, exposed communication, kernels, ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traincast.traces.link import Linked, Step
from traincast.utils.arrays import BoolArray, FloatArray, IndexArray, IntArray, group_positions
from traincast.utils.display.text import shorten_name
from traincast.utils.metrics import sum_by_key


@dataclass(frozen=True, eq=False, slots=True)
class Intervals:
    """Disjoint intervals in order."""

    start: IntArray
    end: IntArray

    @staticmethod
    def from_spans(start: IntArray, end: IntArray) -> Intervals:
        """What at least one of the given intervals covers."""
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        if not len(start):
            return Intervals(start, end)
        reached = np.maximum.accumulate(end)
        first = np.flatnonzero(np.concatenate(([True], start[1:] > reached[:-1])))
        last = np.concatenate((first[1:] - 1, [len(start) - 1]))
        return Intervals(start[first], reached[last])

    @property
    def total(self) -> int:
        """Nanoseconds covered."""
        return int((self.end - self.start).sum())

    def clip_to(self, start: int, end: int) -> Intervals:
        """The part inside a window."""
        inside = slice(np.searchsorted(self.end, start, side="right"), np.searchsorted(self.start, end, side="left"))
        return Intervals(np.maximum(self.start[inside], start), np.minimum(self.end[inside], end))

    def compute_covered(self, start: IntArray, end: IntArray) -> IntArray:
        """Nanoseconds covered inside each of these windows."""
        before = np.concatenate(([0], np.cumsum(self.end - self.start)))
        ends = np.append(self.end, 0)  # the last one is for moments before all intervals

        def until(moment: IntArray) -> IntArray:
            begun = np.searchsorted(self.start, moment, side="right")
            return np.asarray(before[begun] - np.where(begun > 0, np.maximum(ends[begun - 1] - moment, 0), 0))

        return until(end) - until(start)

    def find_gaps(self, start: int, end: int) -> Intervals:
        """What is not covered inside a window."""
        within = self.clip_to(start, end)
        starts, ends = np.append(start, within.end), np.append(within.start, end)
        real = ends > starts
        return Intervals(starts[real], ends[real])

    def subtract_length(self, other: Intervals) -> int:
        """Nanoseconds covered here and not there."""
        both = Intervals.from_spans(np.append(self.start, other.start), np.append(self.end, other.end))
        return both.total - other.total


NO_OP = "(no op)"
"""What the device time is called of kernels that no op of the trace launched."""
_AHEAD = 1.1  # device time of steps over their host time from which the host ran ahead
_BETWEEN = "between ops"
_NO_OP, _END = -1, -2  # instead of the number of a name: no op, and no kernel but the end of the step

PARTS = (
    "compute", "exposed_comm", "host_bound", "synchronised", "event_wait", "graph_nodes", "launch_latency",
    "not_recorded",
)  # fmt: skip
"""What a step is made of: attributes of `StepBreakdown` that add up to it."""

REASONS = PARTS[2:]
"""Why the device was idle; where no launch, or no kernel, is in the trace all of it is the last one."""


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """One measured step of one rank; all times are seconds.

    `step = compute + exposed_comm + idle`. Idle is `host_bound` (the device waited until a call of the host
    had launched something), `synchronised` (likewise, while the host was inside of a synchronising call), `event_wait`
    (a kernel was launched in time but its stream waited for another), `graph_nodes` (it is a graph's node) or
    `launch_latency` (it was launched in time and simply began later); where no launch, or no kernel, is in the trace
    nobody knows, and all of it is `not_recorded`. `evidence` names for each reason what most of it stands before, for
    `host_bound` what the host was in meanwhile. `by_family` and `by_op` are kernel seconds, which can exceed the
    time covered where streams overlap.
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
    not_recorded: float
    evidence: dict[str, str]
    by_family: dict[str, float]
    by_op: dict[str, float]
    kernels: int

    def describe_evidence(self, reason: str) -> str:
        """What most of the idle time of a reason stands before, or what the host was doing in it."""
        what = shorten_name(self.evidence[reason])
        if reason != "host_bound":
            return f"before {what}"
        return f"while the host is {what if what == _BETWEEN else f'in {what}'}"

    @property
    def active(self) -> float:
        """Seconds during which the device ran anything."""
        return self.compute + self.exposed_comm

    @property
    def eg_comm(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed_comm / self.step if self.step else 0.0


def compute_breakdown(linked: Linked) -> list[StepBreakdown]:
    """Every step of a rank's timeline."""
    device, exchanging = linked.device, linked.find_communication(linked.device)
    covered = _Covered(
        compute=_compute_covered(linked, device[~exchanging]),
        communication=_compute_covered(linked, device[exchanging]),
        everything=_compute_covered(linked, device),
        synchronised=_compute_covered(linked, np.flatnonzero(linked.is_synchronise)),
    )
    rows = {index: device[places] for index, places in group_positions(linked.step[device])}
    steps = find_device_steps(linked) or linked.steps
    return [_compute_step(linked, step, covered, rows.get(index, device[:0])) for index, step in enumerate(steps)]


def find_device_steps(linked: Linked) -> tuple[Step, ...]:
    """Steps by the device's clock, from the first kernel of one to the first of the next, where the host runs ahead:
    the device needs longer for what each step launched than the host to launch it. Else none, and the host's count.

    Markers are on the host. One that only fills the queue passes them at its own pace, which nobody waits for.
    """
    if len(linked.steps) < 2 or not linked.launched:
        return ()
    device = linked.device[linked.step[linked.device] >= 0]
    numbers, first = np.unique(linked.step[device], return_index=True)  # rows of devices are by start
    if len(numbers) < len(linked.steps):
        return ()
    starts = linked.events["start"][device[first]]
    ends = np.append(starts[1:], linked.end[device].max())
    busy = _compute_covered(linked, device).total
    on_host = linked.steps[-1].end - linked.steps[0].start
    if busy <= _AHEAD * on_host or (ends <= starts).any():
        return ()
    moments = zip(linked.steps, starts.tolist(), ends.tolist(), strict=True)
    return tuple(Step(step.number, start, end) for step, start, end in moments)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Covered:
    """When the device computed, exchanged data and did either, and when the host was in a synchronising call."""

    compute: Intervals
    communication: Intervals
    everything: Intervals
    synchronised: Intervals


def _compute_covered(linked: Linked, rows: IndexArray | IntArray) -> Intervals:
    return Intervals.from_spans(linked.events["start"][rows], linked.end[rows])


def _compute_step(linked: Linked, step: Step, covered: _Covered, rows: IntArray) -> StepBreakdown:
    inside = covered.compute.clip_to(step.start, step.end)
    exchanging = covered.communication.clip_to(step.start, step.end)
    idle, evidence = _find_idle_reasons(
        linked, covered.everything.find_gaps(step.start, step.end), covered.synchronised
    )
    seconds = 1e-9 * linked.events["duration"][rows]
    families, family = linked.family_numbers
    by_family = _sum_by_number(family[linked.find_telling_names(rows)], seconds)
    by_op = _sum_by_number(_find_op_numbers(linked, rows), seconds)
    return StepBreakdown(
        number=step.number,
        step=step.seconds,
        compute=1e-9 * inside.total,
        communication=1e-9 * exchanging.total,
        exposed_comm=1e-9 * exchanging.subtract_length(inside),
        idle=1e-9 * sum(idle.values()),
        **{reason: 1e-9 * nanoseconds for reason, nanoseconds in idle.items()},
        evidence=evidence,
        by_family=sum_by_key((families[number], value) for number, value in by_family),
        by_op=sum_by_key((_get_op_name(linked, number), value) for number, value in by_op),
        kernels=len(rows),
    )


def _find_op_numbers(linked: Linked, rows: IntArray) -> IntArray:
    """The names, by number, of the top-level ops that launched these kernels; `_NO_OP` for none."""
    author = linked.author[rows]
    scope = np.where(author >= 0, linked.scope[author], -1)
    return np.where(scope >= 0, linked.events["name"][scope], _NO_OP)


def _get_op_name(linked: Linked, number: int) -> str:
    if number == _END:
        return "the end of the step"
    return linked.trace.names[number] if number != _NO_OP else NO_OP


def _sum_by_number(numbers: IntArray, weights: IntArray | FloatArray) -> list[tuple[int, float]]:
    """Weights summed by number, in the order in which the numbers first appear."""
    known, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    sums = np.bincount(group.reshape(-1), weights, minlength=len(known))
    order = np.argsort(first)
    return list(zip(known[order].tolist(), sums[order].tolist(), strict=True))


def _find_idle_reasons(linked: Linked, gaps: Intervals, held: Intervals) -> tuple[dict[str, int], dict[str, str]]:
    """Nanoseconds of idle device time by reason, and what most of each stands before or under. What ends a gap tells
    why it was there; `held` is when the host was in a synchronising call."""
    events, device = linked.events, linked.device
    row = np.append(device, -1)[np.searchsorted(events["start"][device], gaps.end)]  # -1: the step ended
    if not linked.launched or not len(device):
        return _find_reasons_without_launch(linked, gaps, row)
    launch = np.where(row >= 0, linked.launch[row], -1)
    # the device could have gone on from here had it been told to
    told = np.where(row >= 0, np.clip(_find_enqueue_times(linked, row, launch), gaps.start, gaps.end), gaps.end)
    waited, late = held.compute_covered(gaps.start, told), gaps.end - told
    op = np.where(row >= 0, _find_op_numbers(linked, row), _END)
    thread = np.where(launch >= 0, linked.thread[launch], 0)
    doing = _find_host_work(linked, thread, gaps.start, told)
    parts = {"host_bound": (doing, told - gaps.start - waited), "synchronised": (op, waited)}
    parts["not_recorded"] = (op[:0], late[:0])
    for reason, chosen in _explain_late_starts(linked, row, launch).items():
        parts[reason] = (events["name"][row][chosen], late[chosen])
    reasons = {reason: int(parts[reason][1].sum()) for reason in REASONS}
    most = {reason: sum_by_key(_sum_by_number(*parts[reason])) for reason in REASONS if reasons[reason]}
    evidence = {reason: _get_op_name(linked, next(iter(numbers))) for reason, numbers in most.items()}
    if evidence.get("host_bound") == NO_OP:
        evidence["host_bound"] = _BETWEEN
    return reasons, evidence


def _find_host_work(linked: Linked, thread: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """The names, by number, of the top-level ops that these threads were in for most of these times; `_NO_OP` where
    they were in none for half of it."""
    names = np.full(len(start), _NO_OP)
    for number, gaps in group_positions(thread):
        rows = linked.scopes_by_thread.get(number, linked.scopes[:0])
        begins, ends = linked.events["start"][rows], linked.end[rows]
        first = np.searchsorted(ends, start[gaps], side="right")
        count = np.maximum(np.searchsorted(begins, end[gaps], side="left") - first, 0)
        # gaps do not overlap: all pairs of a gap and an op in it are hardly more than either
        gap = np.repeat(gaps, count)
        op = np.arange(len(gap)) - np.repeat(np.cumsum(count) - count - first, count)
        spent = np.minimum(ends[op], end[gap]) - np.maximum(begins[op], start[gap])
        enough = 2 * np.bincount(gap, spent, minlength=len(names)) >= end - start
        order = np.lexsort((-op, spent, gap))  # of equals the first
        longest = order[np.append(gap[order][1:] != gap[order][:-1], True)] if len(order) else order
        longest = longest[enough[gap[longest]]]
        names[gap[longest]] = linked.events["name"][rows[op[longest]]]
    return names


def _find_reasons_without_launch(
    linked: Linked, gaps: Intervals, row: IntArray
) -> tuple[dict[str, int], dict[str, str]]:
    """The reasons for idle time, and what most of it stands before, where no launch, or no kernel, is in the trace."""
    lengths = gaps.end - gaps.start
    before = sum_by_key(_sum_by_number(np.where(row >= 0, linked.events["name"][row], _END), lengths))
    reasons = {**dict.fromkeys(REASONS, 0), "not_recorded": int(lengths.sum())}
    evidence = {"not_recorded": _get_op_name(linked, next(iter(before)))} if reasons["not_recorded"] else {}
    return reasons, evidence


def _find_enqueue_times(linked: Linked, row: IntArray, launch: IntArray) -> IntArray:
    """When the calls behind these kernels had put them on their streams: when they returned, or when the first kernel
    of theirs began, if that was earlier. What has no call was launched before the trace (0), or the call was lost: then
    nobody knows, and it counts as launched when it began."""
    calls = np.maximum(launch, 0)
    without = np.where(linked.follows[row] < 0, 0, linked.events["start"][row])
    told: IntArray = np.where(launch >= 0, np.minimum(linked.end[calls], linked.first_start[calls]), without)
    return told


def _explain_late_starts(linked: Linked, row: IntArray, launch: IntArray) -> dict[str, BoolArray]:
    """Which kernels that had been launched did not begin for which reason; after the last (-1) there is none."""
    waiting = linked.waited_for[row] >= 0
    node = ~waiting & (launch >= 0) & linked.is_graph_launch[launch]
    known = row >= 0
    return {"event_wait": known & waiting, "graph_nodes": known & node, "launch_latency": known & ~waiting & ~node}


@dataclass(frozen=True, kw_only=True)
class RanksBreakdown:
    """Several ranks together: shares of a step, as the study of multi-GPU training defines them.

    `eg_comm` is the least exposed communication of any rank as a share of its step; `eg_imbalance` is how much longer
    the slowest rank's embedding kernels run than the average rank's, as a share of the median step.
    """

    step: float
    eg_comm: float
    eg_imbalance: float


def combine_ranks(ranks: Sequence[Sequence[StepBreakdown]]) -> RanksBreakdown:
    """The medians over steps of each rank, put together."""
    embedding = [float(np.median([step.by_family.get("embedding", 0.0) for step in steps])) for steps in ranks]
    step = float(np.median([step.step for steps in ranks for step in steps]))
    return RanksBreakdown(
        step=step,
        eg_comm=min(float(np.median([step.eg_comm for step in steps])) for steps in ranks),
        eg_imbalance=(max(embedding) - sum(embedding) / len(embedding)) / step,
    )
