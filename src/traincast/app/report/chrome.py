"""A prediction as Chrome trace JSON: host threads and device streams of its ranks, launch flows, the critical path."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from traincast.simulator.prediction.result import Prediction
from traincast.simulator.timeline import Timeline

_MOST_RANKS = 32  # a trace of a thousand ranks is larger than any viewer opens
_CRITICAL = 0  # its process number; ranks count from 1


def make_chrome_trace(prediction: Prediction) -> dict[str, Any]:
    """The trace document; Perfetto and chrome://tracing open it. Times are microseconds from the step's start.

    Ranks that do the same are shown once; of many that differ, those on the critical path and then the first ones.
    """
    shown = _choose_ranks(prediction)
    timelines = {c: prediction.simulation.timeline(c) for c in shown}
    start = min(timeline.origin for timeline in timelines.values())
    events: list[dict[str, Any]] = []
    for number, (c, timeline) in enumerate(timelines.items()):
        events += _Rank(timeline, start, number, _name_rank(prediction, c)).events()
    events += _make_critical_path(prediction, start, order=2 * len(shown))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _choose_ranks(prediction: Prediction) -> list[int]:
    on_path = {part.rank for part in prediction.path}
    classes = sorted(range(len(prediction.ranks)), key=lambda c: (prediction.ranks[c].ranks[0] not in on_path, c))
    return sorted(classes[:_MOST_RANKS])


def _name_rank(prediction: Prediction, c: int) -> str:
    """What goes before "host" and "device" in the names of a rank's processes."""
    if prediction.gpus == 1:
        return ""
    ranks = prediction.ranks[c].ranks
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} like it: " if len(ranks) > 1 else ": ")


def _make_process(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}},
    ]


def _make_thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


class _Rank:
    """The events of one rank: two processes, host and device."""

    def __init__(self, timeline: Timeline, start: float, number: int, name: str) -> None:
        self.timeline, self.start, self.number, self.name = timeline, start, number, name
        self.host, self.device = 2 * number + 1, 2 * number + 2

    def events(self) -> list[dict[str, Any]]:
        """Names, host ops, kernels and the flows between them."""
        return [*self._names(), *self._host(), *self._device()]

    def _us(self, seconds: float) -> float:
        return round(1e6 * (seconds - self.start), 4)

    def _names(self) -> list[dict[str, Any]]:
        schedule = self.timeline.schedule
        return [
            *_make_process(self.host, f"{self.name}host", 2 * self.number),
            *_make_process(self.device, f"{self.name}device", 2 * self.number + 1),
            *(
                _make_thread(self.host, t, f"thread {t}" + (" (autograd)" if t == 1 else ""))
                for t in range(schedule.num_threads)
            ),
            *(_make_thread(self.device, s, f"stream {s}") for s in range(schedule.num_streams)),
        ]

    def _host(self) -> list[dict[str, Any]]:
        """One slice per scope, from the start of its first instruction to the end of its last."""
        schedule, times = self.timeline.schedule, self.timeline.times
        last: dict[int, float] = {}
        slices: dict[int, list[float]] = {}
        for scope, thread, after in zip(
            schedule.scope.tolist(), schedule.thread.tolist(), times.host_after.tolist(), strict=True
        ):
            begin = last.get(thread, self.timeline.origin)
            if scope in slices:
                slices[scope][1] = after
            else:
                slices[scope] = [begin, after, thread]
            last[thread] = after
        scopes = self.timeline.program.scopes
        return [
            {
                "ph": "X", "pid": self.host, "tid": thread, "name": scopes[scope].name,
                "cat": scopes[scope].phase.name.lower(),
                "ts": self._us(begin), "dur": round(1e6 * (end - begin), 4),
            }
            for scope, (begin, end, thread) in slices.items()
        ]  # fmt: skip

    def _device(self) -> list[dict[str, Any]]:
        """One slice per launch, and a flow arrow from its launch call."""
        schedule, times = self.timeline.schedule, self.timeline.times
        signatures, op_signature = self.timeline.program.signatures, self.timeline.program.columns.op_signature
        events: list[dict[str, Any]] = []
        for k, instruction in enumerate(self.timeline.launches.tolist()):
            call = self.timeline.calls[schedule.call[instruction]]
            op = int(schedule.op[instruction])
            stream, thread = int(schedule.target[instruction]), int(schedule.thread[instruction])
            start = self._us(times.kernel_start[k])
            issue = self._us(times.host_issue[instruction])
            args = {"op": signatures[op_signature[op]].name, "compute": call.compute}
            if module := self.timeline.program.names[self.timeline.program.columns.op_module[op]]:
                args["module"] = module
            args |= {name: f"{value:g}" for name, value in zip(call.family.fields, call.values, strict=True)}
            duration = round(1e6 * float(times.kernel_end[k] - times.kernel_start[k]), 4)
            flow = {"cat": "launch", "name": "launch", "id": f"{self.number}.{k}"}
            events += [
                {"ph": "X", "pid": self.device, "tid": stream, "name": f"{call.family.name}: {call.kind}",
                 "cat": call.family.name, "ts": start, "dur": duration, "args": args},
                {"ph": "s", "pid": self.host, "tid": thread, "ts": max(issue - 0.001, 0.0), **flow},
                {"ph": "f", "bp": "e", "pid": self.device, "tid": stream, "ts": start, **flow},
            ]  # fmt: skip
        return events


def _make_critical_path(prediction: Prediction, start: float, order: int) -> list[dict[str, Any]]:
    """The path as a process of its own; on several ranks every slice says on which it is."""
    events = [*_make_process(_CRITICAL, "critical path", order), _make_thread(_CRITICAL, 0, "critical path")]
    for part in prediction.path:
        rank = f"rank {part.rank}: " if prediction.gpus > 1 else ""
        events.append(
            {"ph": "X", "pid": _CRITICAL, "tid": 0, "name": f"{rank}{part.name}", "cat": "critical",
             "ts": round(1e6 * (part.start - start), 4), "dur": round(1e6 * part.seconds, 4),
             "args": {"op": part.op, "rank": part.rank}}
        )  # fmt: skip
    return events


_TRACK = {"op": "thread {}", "step": "steps", "kernel": "stream {}", "critical": "critical path"}
_BESIDE = 100_000  # track numbers of slices that run alongside others of their track begin here
_TOUCH_NS = 2  # clocks are rounded: slices that overlap by no more than this touch


def untangle_slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same events with a name for every track. On a track no slice begins inside of another and ends after it: by
    a nanosecond or two it is made to begin later, else it goes to a track alongside."""
    tracks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(place)
    events = list(events)
    names = []
    for (pid, tid), places in tracks.items():
        lanes = _assign_lanes(events, places, tid)
        title = _TRACK.get(events[places[0]]["cat"], "{}").format(tid)
        names += [_name_track(pid, lane, title if lane == tid else f"{title}, alongside") for lane in sorted(lanes)]
    return [*names, *events]


def _assign_lanes(events: list[dict[str, Any]], places: list[int], tid: int) -> set[int]:
    """Gives every slice of a track its lane; the lanes that were needed."""
    lanes: list[list[int]] = []  # the ends of the slices that are open in each lane, nanoseconds
    used = set()
    for place in sorted(
        places, key=lambda place: (_to_nanoseconds(events[place]["ts"]), -_to_nanoseconds(events[place]["dur"]))
    ):
        event = events[place]
        start = _to_nanoseconds(event["ts"])
        end = start + _to_nanoseconds(event["dur"])
        number, start = _find_lane(lanes, start, end)
        lane = tid if number == 0 else _BESIDE * number + tid
        used.add(lane)
        events[place] = {**event, "tid": lane, "ts": start / 1000, "dur": (end - start) / 1000}
    return used


def _find_lane(lanes: list[list[int]], start: int, end: int) -> tuple[int, int]:
    """The first lane into which a slice fits, and where it then begins."""
    for number, opened in enumerate([*lanes, []]):
        if number == len(lanes):
            lanes.append(opened)
        while opened and opened[-1] <= start:
            opened.pop()
        if opened and end > opened[-1] and opened[-1] - start <= _TOUCH_NS:
            start = opened.pop()
            while opened and opened[-1] <= start:
                opened.pop()
        if not opened or end <= opened[-1]:
            opened.append(end)
            return number, min(start, end)
    raise AssertionError("an empty lane takes any slice")


def _to_nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


def _name_track(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
