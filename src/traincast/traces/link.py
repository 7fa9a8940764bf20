"""What belongs together in a timeline: op trees, launches and their kernels, steps, and what waits for what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from traincast.arrays import BoolArray, IntArray, grouped
from traincast.errors import TraincastError
from traincast.traces.classify import COMMUNICATION, kernel_family
from traincast.traces.events import DEVICE_KINDS, Kind, TimelineTrace
from traincast.traces.markers import STEP as _STEP
from traincast.traces.markers import marker_rows
from traincast.traces.nodes import rows_of
from traincast.traces.periods import periodic_rows
from traincast.traces.tables import Table

_LAUNCH = re.compile(r"(?:cuda|hip|cu)\w*(?:Launch|Memcpy|Memset|memcpy|memset)\w*")
_SYNCHRONISE = re.compile(
    r"(?:cuda|hip|cu)\w*Synchronize|(?:cuda|hip)Memcpy(?:2D|3D)?$|hipMemcpyWithStream$|cuMemcpy\w+_v2$"
)
_WAIT_EVENT = re.compile(r"(?:cuda|hip|cu)StreamWaitEvent")
# annotations that are themselves a unit of host work; all others only wrap ops
_UNIT = re.compile(r"Optimizer\.|enumerate\(DataLoader\)")
_WRAPPER = re.compile(
    r"ProfilerStep|## |autograd::engine::evaluate_function|DistributedDataParallel\.forward$|\[param\|"
)
_WAIT_TOLERANCE_NS = 25_000  # a waiting stream goes on this long after what it waited for, at most
HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the training loop as the profiler marked it; nanoseconds on the trace's clock.

    `end` is where the next step starts, or for the last one where its marker ends.
    """

    number: int
    start: int
    end: int

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return 1e-9 * (self.end - self.start)


@dataclass(frozen=True, eq=False, kw_only=True)
class Linked:
    """A timeline with its events tied together. Arrays hold one entry per event: the row of another event, or -1.

    `thread` numbers host threads (0 is the one with the step markers), `parent` the enclosing host event, `scope` the
    top-level op, `launch` the runtime call behind a kernel, `waited_for` the kernel of another stream that a kernel
    had to wait for, `step` the index in `steps` (by host time, for kernels that of their launch). `marked` says
    whether steps could be told; if not, the whole trace is one. `period` is the number of kernels of a step where
    nothing but their sequence told them, else 0.
    """

    trace: TimelineTrace
    steps: tuple[Step, ...]
    marked: bool
    thread: IntArray
    parent: IntArray
    scope: IntArray
    launch: IntArray
    waited_for: IntArray
    step: IntArray
    period: int = 0

    @property
    def events(self) -> Table:
        """The rows of the trace."""
        return self.trace.events

    @cached_property
    def end(self) -> IntArray:
        """When every event ends, nanoseconds."""
        ends: IntArray = self.events["start"] + self.events["duration"]
        return ends

    @cached_property
    def device(self) -> IntArray:
        """Rows of kernels, copies and memsets, by start."""
        rows = self.trace.of_kind(*DEVICE_KINDS)
        return rows[np.argsort(self.events["start"][rows], kind="stable")]

    @cached_property
    def stream(self) -> IntArray:
        """The number of the stream of kernels, copies and memsets (streams of two devices are two); -1 for others."""
        return stream_numbers(self.trace)

    @cached_property
    def host(self) -> IntArray:
        """Rows of host events by start; an event comes before what it encloses."""
        return _host_order(self.trace)

    @cached_property
    def scopes(self) -> IntArray:
        """Rows of the top-level ops, by start."""
        scopes: IntArray = self.host[self.scope[self.host] == self.host]
        return scopes

    @cached_property
    def scopes_by_thread(self) -> dict[int, IntArray]:
        """Rows of every thread's top-level ops, by start."""
        threads = self.thread[self.scopes]
        return {thread: self.scopes[places] for thread, places in grouped(threads)}

    @cached_property
    def scope_spans(self) -> dict[int, tuple[IntArray, IntArray]]:
        """Starts and ends of every thread's top-level ops, nanoseconds."""
        threads = self.scopes_by_thread.items()
        return {thread: (self.events["start"][rows], self.end[rows]) for thread, rows in threads}

    @cached_property
    def kernels_of(self) -> dict[int, list[int]]:
        """Rows of the kernels, copies and memsets that every runtime call launched, by start."""
        launched: dict[int, list[int]] = {}
        for row in self.device[self.launch[self.device] >= 0].tolist():
            launched.setdefault(int(self.launch[row]), []).append(row)
        return launched

    @cached_property
    def _family_of_name(self) -> npt.NDArray[np.str_]:
        return np.array([kernel_family(name) for name in self.trace.names])

    def families(self, rows: IntArray) -> npt.NDArray[np.str_]:
        """The kernel family of each of these kernels."""
        return np.asarray(self._family_of_name[self.events["name"][rows]])

    def family_of(self, name: int) -> str:
        """The kernel family that the name of this number is of."""
        return str(self._family_of_name[name])

    def communicates(self, rows: IntArray) -> BoolArray:
        """Which of these kernels exchange data with other ranks."""
        return np.asarray(self.families(rows) == COMMUNICATION)

    def enclosing(self, row: int) -> Iterator[int]:
        """The host events around a host event, innermost first."""
        above = int(self.parent[row])
        while above >= 0:
            yield above
            above = int(self.parent[above])

    def scope_of_kernel(self, row: int) -> int:
        """The top-level op that launched a kernel; -1 for none."""
        launch = int(self.launch[row])
        return int(self.scope[launch]) if launch >= 0 else -1

    def runtime_rows(self, pattern: re.Pattern[str]) -> BoolArray:
        """Which events are runtime calls of this name."""
        matching = np.array([bool(pattern.match(name)) for name in self.trace.names])
        chosen: BoolArray = (self.events["kind"] == Kind.RUNTIME) & matching[self.events["name"]]
        return chosen

    @cached_property
    def is_launch(self) -> BoolArray:
        """Which events are runtime calls that put work on a stream."""
        return self.runtime_rows(_LAUNCH)

    @cached_property
    def is_synchronise(self) -> BoolArray:
        """Which events are runtime calls that hold the host for the device."""
        return self.runtime_rows(_SYNCHRONISE)

    @cached_property
    def is_wait(self) -> BoolArray:
        """Which events are runtime calls that make a stream wait for an event."""
        return self.runtime_rows(_WAIT_EVENT)

    def name(self, row: int) -> str:
        """Name of an event."""
        return self.trace.names[int(self.events["name"][row])]


def link(trace: TimelineTrace, marker: str = "") -> Linked:
    """Ties the events of a timeline together. Steps begin at ops or annotations called `marker`; by default at the
    profiler's own markers, else at an optimizer's steps, else as often as the sequence of kernels comes again."""
    markers = marker_rows(trace, marker)
    thread = _threads(trace, markers)
    parent, scope = _tree(trace, thread)
    launch = _launches(trace)
    period = 0
    if not len(markers):
        markers, period = periodic_rows(trace, thread, scope, launch)
    steps, marked = _steps(trace, markers)
    starts = np.array([step.start for step in steps])
    at = np.where(launch >= 0, trace.events["start"][np.maximum(launch, 0)], trace.events["start"])
    step = np.searchsorted(starts, at, side="right") - 1
    step[at >= steps[-1].end] = -1
    on_device = np.isin(trace.events["kind"], DEVICE_KINDS)
    if marked:
        step[on_device & (launch < 0)] = -1  # launched before the window: belongs to no step
    return Linked(
        trace=trace, steps=steps, marked=marked, thread=thread, parent=parent, scope=scope, launch=launch,
        waited_for=_waits(trace, launch), step=step, period=period,
    )  # fmt: skip


def stream_numbers(trace: TimelineTrace) -> IntArray:
    """Streams by number, in the order of device and stream; -1 for what is no kernel, copy or memset."""
    numbers = np.full(len(trace.events), -1, dtype=np.int64)
    device = trace.of_kind(*DEVICE_KINDS)
    keys = np.stack([trace.events["device"][device], trace.events["stream"][device]], axis=1)
    numbers[device] = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    return numbers


def _host_order(trace: TimelineTrace) -> IntArray:
    rows = trace.of_kind(*HOST_KINDS)
    events = trace.events[rows]
    return rows[np.lexsort((events["kind"] == Kind.RUNTIME, -events["duration"], events["start"]))]


def thread_keys(trace: TimelineTrace) -> IntArray:
    """A number for the process and thread of every event; traces write the same one as a number and as text."""
    keys: dict[tuple[str, str], int] = {}
    number = np.array([keys.setdefault((str(p), str(t)), len(keys)) for p, t in trace.tracks], dtype=np.int64)
    return np.asarray(number[trace.events["track"]])


def _threads(trace: TimelineTrace, marker: IntArray) -> IntArray:
    """Host threads by number: the marked one first, then by first event. Devices get -1."""
    host = _host_order(trace)
    if not len(host):
        raise TraincastError(f"'{trace.path}' has no host events; record CPU activities too")
    event_key = thread_keys(trace)
    first = int(event_key[marker[0]]) if len(marker) else int(np.bincount(event_key[host]).argmax())
    order = {first: 0}
    for key in event_key[host].tolist():
        order.setdefault(key, len(order))
    number = np.full(int(event_key.max()) + 1, -1, dtype=np.int64)
    number[list(order)] = list(order.values())
    thread = np.full(len(trace.events), -1, dtype=np.int64)
    thread[host] = number[event_key[host]]
    return thread


def _tree(trace: TimelineTrace, thread: IntArray) -> tuple[IntArray, IntArray]:
    """Parent and scope of every host event, by containment in time on its thread."""
    host = _host_order(trace)
    columns = trace.events[host]
    allowed = [_can_be_scope(name) for name in trace.names]
    parent = np.full(len(trace.events), -1, dtype=np.int64)
    scope = np.full(len(trace.events), -1, dtype=np.int64)
    stacks: dict[int, list[tuple[int, int, int]]] = {}  # thread -> (end, row, scope)
    parents, scopes = [], []
    for row, t, start, duration, kind, name in zip(
        host.tolist(), thread[host].tolist(), columns["start"].tolist(), columns["duration"].tolist(),
        columns["kind"].tolist(), columns["name"].tolist(), strict=True,
    ):  # fmt: skip
        stack = stacks.setdefault(t, [])
        while stack and stack[-1][0] <= start:
            stack.pop()
        above, top = (stack[-1][1], stack[-1][2]) if stack else (-1, -1)
        if top < 0 and kind != Kind.RUNTIME and allowed[name][kind]:
            top = row
        parents.append(above)
        scopes.append(top)
        if kind != Kind.RUNTIME:
            stack.append((start + duration, row, top))
    parent[host], scope[host] = parents, scopes
    return parent, scope


def _can_be_scope(name: str) -> tuple[bool, bool]:
    """Whether an op, and whether an annotation, of this name is a unit of host work rather than a wrapper of some."""
    unit = bool(_UNIT.match(name))
    return unit or not _WRAPPER.match(name), unit


def _launches(trace: TimelineTrace) -> IntArray:
    """The runtime call of every kernel, copy and memset, by correlation."""
    launch = np.full(len(trace.events), -1, dtype=np.int64)
    calls, device = trace.of_kind(Kind.RUNTIME), trace.of_kind(*DEVICE_KINDS)
    calls = calls[trace.events["correlation"][calls] >= 0]
    order = np.argsort(trace.events["correlation"][calls], kind="stable")
    caller = rows_of(trace.events["correlation"][calls][order], calls[order], trace.events["correlation"][device])
    launch[device] = np.where(trace.events["correlation"][device] >= 0, caller, -1)
    return launch


def _steps(trace: TimelineTrace, rows: IntArray) -> tuple[tuple[Step, ...], bool]:
    events = trace.events
    steps = _marked_steps(trace, rows) if len(rows) else ()
    if not steps:
        host = trace.of_kind(*HOST_KINDS, *DEVICE_KINDS)
        start, end = int(events["start"][host].min()), int((events["start"] + events["duration"])[host].max())
        if end <= start:
            raise TraincastError(f"'{trace.path}' has no time in it: all events are at one moment; record it anew")
        return (Step(0, start, end),), False
    return steps, True


def _marked_steps(trace: TimelineTrace, rows: IntArray) -> tuple[Step, ...]:
    """Steps from marker to marker; one that took no time is none."""
    events = trace.events
    starts = events["start"][rows].tolist()
    ends = [*starts[1:], int(events["start"][rows[-1]] + events["duration"][rows[-1]])]
    numbers = [_STEP.match(trace.names[name]) for name in events["name"][rows]]
    if not all(numbers):  # what begins a step does not last as long as it: of the last one the end is not known
        ends = [*ends[:-1], starts[-1]]
    return tuple(
        Step(int(number[1]) if number else place, start, end)
        for place, (number, start, end) in enumerate(zip(numbers, starts, ends, strict=True))
        if end > start
    )


def _waits(trace: TimelineTrace, launch: IntArray) -> IntArray:
    """For a kernel that began later than its launch and its stream allow: the kernel elsewhere it waited for.

    Few traces record events. What a stream waited for shows in the times: a kernel of another stream, launched
    earlier, that ended just before. Only launches behind a wait call on the host are looked at.
    """
    events, streams = trace.events, stream_numbers(trace)
    waited = np.full(len(events), -1, dtype=np.int64)
    pattern = np.array([bool(_WAIT_EVENT.match(name)) for name in trace.names])
    calls = np.sort(events["start"][np.flatnonzero(pattern[events["name"]] & (events["kind"] == Kind.RUNTIME))])
    device = trace.of_kind(*DEVICE_KINDS)
    device = device[launch[device] >= 0]
    if not len(calls) or not len(device):
        return waited
    device = device[np.argsort(events["start"][launch[device]], kind="stable")]
    issued = events["start"][launch[device]]
    called = np.searchsorted(calls, issued)  # wait calls made before each launch
    every = trace.of_kind(*DEVICE_KINDS)
    by_end = every[np.argsort((events["start"] + events["duration"])[every], kind="stable")]
    ends = (events["start"] + events["duration"])[by_end]
    called_at = np.where(
        launch >= 0, events["start"][np.maximum(launch, 0)], -1
    )  # work from before the trace was earlier
    seen: dict[int, tuple[int, int]] = {}  # stream -> (wait calls before its last launch, end of its last kernel)
    for row, at, number in zip(device.tolist(), issued.tolist(), called.tolist(), strict=True):
        stream, start = int(streams[row]), int(events["start"][row])
        before, free = seen.get(stream, (-1, 0))
        seen[stream] = (number, start + int(events["duration"][row]))
        if number == before or start <= max(free, at) + _WAIT_TOLERANCE_NS:
            continue
        place = int(np.searchsorted(ends, start, side="right")) - 1
        while place >= 0 and ends[place] >= start - _WAIT_TOLERANCE_NS:
            other = int(by_end[place])
            if streams[other] != stream and called_at[other] < at:
                waited[row] = other
                break
            place -= 1
    return waited
