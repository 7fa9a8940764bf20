"""What belongs together in a timeline: op trees, launches and their kernels, steps, and what waits for what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from traincast.traces.calls import (
    align_device_clock,
    build_op_tree,
    find_launches,
    find_previous_launched,
    number_threads,
    sort_host_events,
    stream_numbers,
)
from traincast.traces.captures import GRAPH_LAUNCH, LAUNCH, find_authors, find_captures
from traincast.traces.classify import BARE_TRITON, COMMUNICATION, OTHER, find_kernel_family
from traincast.traces.events import DEVICE_KINDS, HOST_KINDS, Kind, Table, TimelineTrace
from traincast.traces.markers import STEP as _STEP
from traincast.traces.markers import find_marker_rows, find_periodic_rows, mask_numbers
from traincast.utils.arrays import BoolArray, IntArray, group_positions
from traincast.utils.errors import TraincastError

_SYNCHRONISE = re.compile(
    r"(?:cuda|hip|cu|ze)\w*Synchronize|(?:cuda|hip)Memcpy(?:2D|3D)?$|hipMemcpyWithStream$|cuMemcpy\w+_v2$"
    r"|urQueueFinish$|urEventWait$"
)
_COVERED = 0.5  # share of a trace that steps told by their kernels alone have to make up
_WAIT_EVENT = re.compile(r"(?:cuda|hip|cu)StreamWaitEvent")
_BEGUN = 0.1  # of the usual length: a last step that is shorter and launched nothing had only begun
_WAIT_TOLERANCE_NS = 25_000  # a waiting stream goes on this long after what it waited for, at most


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
    top-level op, `launch` the runtime call behind a kernel, `author` the call that says what a kernel is (of a graph's
    node the one that was captured), `follows` the kernel before one whose call was lost, `waited_for` the kernel of
    another stream that a kernel had to wait for, `capture` the number of the capture of a graph that a host event is
    part of, `step` the index in `steps` (by host time, for kernels that of their launch). `marked` says
    whether steps could be told; if not, the whole trace is one. `period` is the number of kernels of a step where
    nothing but their sequence told them, else 0; `marker` is what marks them ("#" for numbers) where neither the
    profiler did nor anybody named it, else "". `cut` is the number of a last step that the profiler had only begun,
    which is none of `steps`; -1 where there is none. `repeats` is how often a sequence of kernels comes again inside of
    a trace that is one step: layers, not steps. `clocks` says by how much those of host and device differed.
    `unlaunched` counts steps at the begin whose calls were not recorded, which are none of `steps`.
    """

    trace: TimelineTrace
    steps: tuple[Step, ...]
    marked: bool
    thread: IntArray
    parent: IntArray
    scope: IntArray
    launch: IntArray
    author: IntArray
    capture: IntArray
    follows: IntArray
    waited_for: IntArray
    step: IntArray
    period: int = 0
    marker: str = ""
    cut: int = -1
    repeats: int = 0
    clocks: str = ""
    unlaunched: int = 0

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
        rows = self.trace.find_rows(*DEVICE_KINDS)
        return rows[np.argsort(self.events["start"][rows], kind="stable")]

    @cached_property
    def stream(self) -> IntArray:
        """The number of the stream of kernels, copies and memsets (streams of two devices are two); -1 for others."""
        return stream_numbers(self.trace)

    @cached_property
    def launched(self) -> bool:
        """Whether launches were recorded: not so where kernels ran and no launch of any is in the trace. Then nothing
        is known of what the device waited for."""
        return not len(self.device) or bool((self.launch[self.device] >= 0).any())

    @cached_property
    def host(self) -> IntArray:
        """Rows of host events by start, but for those that only captured graphs; an event comes before what it
        encloses."""
        rows = sort_host_events(self.trace)
        return rows[self.capture[rows] < 0]

    @cached_property
    def scopes(self) -> IntArray:
        """Rows of the top-level ops, by start."""
        scopes: IntArray = self.host[self.scope[self.host] == self.host]
        return scopes

    @cached_property
    def scopes_by_thread(self) -> dict[int, IntArray]:
        """Rows of every thread's top-level ops, by start."""
        threads = self.thread[self.scopes]
        return {thread: self.scopes[places] for thread, places in group_positions(threads)}

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
    def first_start(self) -> IntArray:
        """When the first kernel, copy or memset of every runtime call began, nanoseconds; the largest number for what
        launched none."""
        first = np.full(len(self.events), np.iinfo(np.int64).max)
        rows = self.device[self.launch[self.device] >= 0]
        np.minimum.at(first, self.launch[rows], self.events["start"][rows])
        return first

    @cached_property
    def _family_of_name(self) -> npt.NDArray[np.str_]:
        on_device = set(np.unique(self.events["name"][self.trace.find_rows(*DEVICE_KINDS)]).tolist())
        names = enumerate(self.trace.names)
        return np.array([find_kernel_family(name) if self._compiled[number] or number in on_device else OTHER
                         for number, name in names])  # fmt: skip

    @cached_property
    def family_numbers(self) -> tuple[list[str], IntArray]:
        """The families of kernels in the trace, and the number among them of that of every name."""
        families, numbers = np.unique(self._family_of_name, return_inverse=True)
        return families.tolist(), numbers.reshape(-1)

    def find_telling_names(self, rows: IntArray) -> IntArray:
        """The names, by number, that tell the families of these kernels: of Triton's that are only numbered, the op's
        around."""
        names = self.events["name"]
        own, author = names[rows], self.author[rows]
        op = self.parent[np.maximum(author, 0)]
        said = self._bare[own] & (author >= 0) & (op >= 0) & self._compiled[names[op]]
        return np.where(said, names[op], own)

    @cached_property
    def _bare(self) -> BoolArray:
        return np.array([bool(BARE_TRITON.match(name)) for name in self.trace.names], dtype=np.bool_)

    @cached_property
    def _compiled(self) -> BoolArray:
        return np.array([name.startswith("triton_") for name in self.trace.names], dtype=np.bool_)

    def find_families(self, rows: IntArray) -> npt.NDArray[np.str_]:
        """The kernel family of each of these kernels."""
        return np.asarray(self._family_of_name[self.find_telling_names(rows)])

    def find_family(self, name: int) -> str:
        """The kernel family that the name of this number is of."""
        return str(self._family_of_name[name])

    def find_communication(self, rows: IntArray) -> BoolArray:
        """Which of these kernels exchange data with other ranks."""
        return np.asarray((self._family_of_name == COMMUNICATION)[self.events["name"][rows]])

    def iterate_enclosing(self, row: int) -> Iterator[int]:
        """The host events around a host event, innermost first."""
        above = int(self.parent[row])
        while above >= 0:
            yield above
            above = int(self.parent[above])

    def find_replay(self, row: int) -> int:
        """The launch of a graph that a kernel ran in, whose captured op runs anew every time; -1 for none."""
        return int(self.launch[row]) if self.launch[row] != self.author[row] else -1

    def find_scope_of_kernel(self, row: int) -> int:
        """The top-level op that a kernel belongs to; -1 for none."""
        author = int(self.author[row])
        return int(self.scope[author]) if author >= 0 else -1

    def find_runtime_rows(self, pattern: re.Pattern[str]) -> BoolArray:
        """Which events are runtime calls of this name, but for captured ones, which did nothing."""
        matching = np.array([bool(pattern.match(name)) for name in self.trace.names])
        chosen: BoolArray = (self.events["kind"] == Kind.RUNTIME) & matching[self.events["name"]]
        return chosen & (self.capture < 0)

    @cached_property
    def is_launch(self) -> BoolArray:
        """Which events are runtime calls that put work on a stream."""
        return self.find_runtime_rows(LAUNCH)

    @cached_property
    def is_graph_launch(self) -> BoolArray:
        """Which events are runtime calls that put a graph on a stream."""
        return self.find_runtime_rows(GRAPH_LAUNCH)

    @cached_property
    def is_synchronise(self) -> BoolArray:
        """Which events are runtime calls that hold the host for the device."""
        return self.find_runtime_rows(_SYNCHRONISE)

    @cached_property
    def is_wait(self) -> BoolArray:
        """Which events are runtime calls that make a stream wait for an event."""
        return self.find_runtime_rows(_WAIT_EVENT)

    def get_name(self, row: int) -> str:
        """Name of an event."""
        return self.trace.names[int(self.events["name"][row])]


def link_trace(trace: TimelineTrace, marker: str = "") -> Linked:
    """Ties the events of a timeline together. Steps begin at ops or annotations called `marker`; by default at the
    profiler's own markers, else at an optimizer's steps, else at annotations that call themselves steps, else as often
    as the sequence of kernels comes again."""
    markers = find_marker_rows(trace, marker)
    found = trace.names[int(trace.events["name"][markers[0]])] if len(markers) else ""
    found = "" if marker or _STEP.match(found) else mask_numbers(found)
    host, capture = sort_host_events(trace), find_captures(trace)
    thread = number_threads(trace, markers, host, host[capture[host] < 0])
    parent, scope = build_op_tree(trace, thread, host)
    launch = find_launches(trace)
    trace, _, said = align_device_clock(trace, launch)
    period = 0
    if not len(markers):
        markers, period = find_periodic_rows(trace, thread, scope, launch)
    rows = trace.find_rows(*HOST_KINDS, *DEVICE_KINDS)
    rows = rows[capture[rows] < 0]
    steps, marked = _find_steps(trace, markers, rows)
    repeats = 0
    if period and not _cover_trace(trace, steps, rows):
        steps, marked, period, repeats = *_find_steps(trace, markers[:0], rows), 0, len(steps)
    issued = trace.events["start"][launch[launch >= 0]]
    steps, cut = _drop_unfinished_step(steps, issued)
    lost = len(issued) < len(trace.find_rows(*DEVICE_KINDS))
    steps, unlaunched = _drop_steps_before_launches(steps, issued) if lost else (steps, 0)
    starts = np.array([step.start for step in steps])
    before = find_previous_launched(trace, launch)
    call = np.where(before >= 0, launch[before], launch)  # one whose call was lost belongs where the one before it does
    at = np.where(call >= 0, trace.events["start"][np.maximum(call, 0)], trace.events["start"])
    step = np.searchsorted(starts, at, side="right") - 1
    step[(at >= steps[-1].end) | (capture >= 0)] = -1
    on_device = np.isin(trace.events["kind"], DEVICE_KINDS)
    if marked and (launch >= 0).any():
        step[on_device & (call < 0)] = -1  # launched before the window: belongs to no step
    return Linked(
        trace=trace, steps=steps, marked=marked, thread=thread, parent=parent, scope=scope, launch=launch,
        author=find_authors(trace, launch, capture), capture=capture, follows=before,
        waited_for=_find_waits(trace, launch), step=step, period=period, marker=found, cut=cut,
        repeats=repeats, clocks=said, unlaunched=unlaunched,
    )  # fmt: skip


def _cover_trace(trace: TimelineTrace, steps: tuple[Step, ...], rows: IntArray) -> bool:
    """Whether these steps are what a trace of these events is made of; else they are alike parts of a step, such as
    layers."""
    start, end = trace.events["start"][rows], (trace.events["start"] + trace.events["duration"])[rows]
    return steps[-1].end - steps[0].start >= _COVERED * float(end.max() - start.min())


def _find_steps(trace: TimelineTrace, markers: IntArray, rows: IntArray) -> tuple[tuple[Step, ...], bool]:
    """Steps from marker to marker, else all of these events as one; and whether there are markers."""
    events = trace.events
    steps = _find_marked_steps(trace, markers) if len(markers) else ()
    if not steps:
        start, end = int(events["start"][rows].min()), int((events["start"] + events["duration"])[rows].max())
        if end <= start:
            raise TraincastError(f"'{trace.path}' has no time in it: all events are at one moment; record it anew")
        return (Step(0, start, end),), False
    return steps, True


def _find_marked_steps(trace: TimelineTrace, rows: IntArray) -> tuple[Step, ...]:
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


def _drop_unfinished_step(steps: tuple[Step, ...], launched: IntArray) -> tuple[tuple[Step, ...], int]:
    """The steps without the last one, and its number, where the profiler stopped before that launched anything
    (`launched` are the moments of all launches) and while it was short; else all of them and -1."""
    if len(steps) < 2:
        return steps, -1
    last = steps[-1]
    usual = float(np.median([step.seconds for step in steps[:-1]]))
    inside = (launched >= last.start) & (launched < last.end)
    if last.seconds > _BEGUN * usual or inside.any() or not len(launched):
        return steps, -1
    return steps[:-1], last.number


def _drop_steps_before_launches(steps: tuple[Step, ...], issued: IntArray) -> tuple[tuple[Step, ...], int]:
    """The steps without those before the first launch (`issued` are the moments of all), and how many these are: what
    they launched ran, but nobody knows which of it."""
    before = sum(step.end <= issued.min() for step in steps) if len(issued) else 0
    return (steps[before:], before) if before < len(steps) else (steps, 0)


def _find_waits(trace: TimelineTrace, launch: IntArray) -> IntArray:
    """For a kernel that began later than its launch and its stream allow: the kernel elsewhere it waited for.

    Few traces record events. What a stream waited for shows in the times: a kernel of another stream, launched
    earlier, that ended just before. Only launches behind a wait call on the host are looked at.
    """
    events, streams = trace.events, stream_numbers(trace)
    waited = np.full(len(events), -1, dtype=np.int64)
    pattern = np.array([bool(_WAIT_EVENT.match(name)) for name in trace.names])
    calls = np.sort(events["start"][np.flatnonzero(pattern[events["name"]] & (events["kind"] == Kind.RUNTIME))])
    device = trace.find_rows(*DEVICE_KINDS)
    device = device[launch[device] >= 0]
    if not len(calls) or not len(device):
        return waited
    device = device[np.argsort(events["start"][launch[device]], kind="stable")]
    issued = events["start"][launch[device]]
    called = np.searchsorted(calls, issued)  # wait calls made before each launch
    every = trace.find_rows(*DEVICE_KINDS)
    by_end = every[np.argsort((events["start"] + events["duration"])[every], kind="stable")]
    ends = (events["start"] + events["duration"])[by_end]
    calling = launch[by_end]
    called_at = np.where(calling >= 0, events["start"][calling], -1)  # work from before the trace was earlier
    late = _find_late_starts(events, device, streams[device], issued, called)
    for row, at in zip(device[late].tolist(), issued[late].tolist(), strict=True):
        stream, start = streams[row], int(events["start"][row])
        place = int(np.searchsorted(ends, start, side="right")) - 1
        while place >= 0 and ends[place] >= start - _WAIT_TOLERANCE_NS:
            if streams[by_end[place]] != stream and called_at[place] < at:
                waited[row] = by_end[place]
                break
            place -= 1
    return waited


def _find_late_starts(events: Table, rows: IntArray, stream: IntArray, issued: IntArray, waits: IntArray) -> IntArray:
    """Which kernels, in the order of their launches, began later than launch and stream allow, and had a wait call
    between their launch and the one before on their stream; `waits` counts those calls."""
    order = np.argsort(stream, kind="stable")
    start, end = events["start"][rows], events["start"][rows] + events["duration"][rows]
    free, before = np.zeros_like(start), np.full(len(rows), -1)
    follows = np.flatnonzero(stream[order[1:]] == stream[order[:-1]])
    free[order[follows + 1]], before[order[follows + 1]] = end[order[follows]], waits[order[follows]]
    late: IntArray = np.flatnonzero((waits != before) & (start > np.maximum(free, issued) + _WAIT_TOLERANCE_NS))
    return late
