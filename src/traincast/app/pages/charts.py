"""Charts and timelines of a page, as plain data that the page's scripts draw."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from traincast.costs.kernels.contract import DRAM_SHARE, Calls
from traincast.costs.kernels.cost import count_work
from traincast.hardware.device import Device
from traincast.ir.memory import CATEGORIES
from traincast.simulator.memory.device_memory import DeviceMemory
from traincast.simulator.scenario.scaling import ScalingCurve
from traincast.simulator.timeline import Timeline
from traincast.traces.classify import find_kernel_family
from traincast.traces.profiler.tables import MemoryPoint
from traincast.utils.arrays import FloatArray

_MOST_POINTS = 600  # of a curve: more than a screen has pixels for
_MOST_DEVICES = 8  # of one trace: a node has no more
_LEAST_INTENSITY = 1e-3  # operations per byte: below, a kernel copies
_NEAR = 0.4  # share of the capacity from which its line is drawn: below, it would only flatten the curve
Chart = dict[str, Any]


def make_memory_chart(memory: DeviceMemory) -> Chart:
    """Allocated memory (GB) of the fullest rank over its step (% of what its host allocates and frees), categories
    stacked, with the peak marked and the device's capacity."""
    ticks, sums = memory.events.sample_categories(_MOST_POINTS)
    x = 100.0 * (ticks + 1) / max(memory.events.ticks, 1)
    shown = np.flatnonzero(sums.max(axis=1) > 0)
    stacked = np.cumsum(sums[shown], axis=0) / 1e9
    series: list[dict[str, Any]] = [
        {"label": CATEGORIES[number].replace("_", " "), "y": _round_numbers(y), "kind": "step", "slot": place % 8,
         "band": place > 0}
        for place, (number, y) in enumerate(zip(shown.tolist(), stacked, strict=True))
    ]  # fmt: skip
    peak = [memory.peak_bytes / 1e9 if tick == memory.events.peak_tick else None for tick in ticks.tolist()]
    series.append({"label": "peak", "y": peak, "kind": "points", "strong": True})
    if memory.peak_bytes > _NEAR * memory.limit_bytes:
        line = [memory.limit_bytes / 1e9] * len(ticks)
        series.append({"label": "capacity", "y": line, "kind": "edge", "dash": 1, "strong": True})
    return {"x": _round_numbers(x), "x_label": "of the step, %", "y_label": "GB on the device", "series": series}


def make_traced_memory_chart(points: Sequence[MemoryPoint]) -> Chart | None:
    """Allocated memory (GB) of the first devices over the traced steps (ms); None where it was not recorded."""
    devices = list(dict.fromkeys(point.device for point in points))[:_MOST_DEVICES]
    if not devices:
        return None
    curves = {device: [point for point in points if point.device == device] for device in devices}
    moments = np.unique([point.seconds for own in curves.values() for point in own])
    series = []
    for device, own in curves.items():
        at = np.searchsorted([point.seconds for point in own], moments, side="right") - 1
        allocated = np.array([point.allocated for point in own])[np.maximum(at, 0)] / 1e9
        series.append({"label": f"device {device}", "y": _round_numbers(allocated), "kind": "step"})
    return {"x": _round_numbers(1e3 * moments), "x_label": "ms from the first step", "y_label": "GB on the device",
            "series": series}  # fmt: skip


def make_scaling_chart(curve: ScalingCurve) -> Chart:
    """Milliseconds of a step over GPUs, with the 90 % interval as a band."""
    results = [point.answer for point in curve.points]
    return {
        "x": [point.gpus for point in curve.points], "x_label": "GPUs", "y_label": "ms per step",
        "log_x": True, "base_x": 2,
        "series": [
            {"label": "90 % from", "y": [1e3 * a.interval[0] for a in results], "kind": "edge"},
            {"label": "90 % to", "y": [1e3 * a.interval[1] for a in results], "kind": "edge", "slot": 0, "band": True},
            {"label": "ms per step", "y": [1e3 * a.iteration for a in results], "kind": "line", "slot": 0},
        ],
    }  # fmt: skip


def make_roofline_chart(points: Sequence[RooflinePoint], device: Device) -> Chart:
    """Operations a second over operations per byte, both logarithmic: kernels by family below what the device can
    do."""
    families = list(dict.fromkeys(point.family for point in points))
    low = min(point.intensity for point in points) / 2
    high = max(max(point.intensity for point in points) * 2, 1e3)
    grid = np.geomspace(low, high, 60)
    placed = sorted(points, key=lambda point: point.intensity)
    x = np.concatenate((grid, [point.intensity for point in placed]))
    order = np.argsort(x, kind="stable")
    series = [
        {
            "label": label,
            "y": _round_numbers(np.minimum(rate, bandwidth * x)[order] / 1e12),
            "kind": "edge",
            "dash": dash,
            "strong": True,
        }
        for label, rate, bandwidth, dash in _list_ceilings(placed, device)
    ]
    for slot, family in enumerate(families):
        column: list[float | None] = [None for _ in grid]
        column += [p.flops / p.seconds / 1e12 if p.family == family else None for p in placed]
        series.append({"label": family, "y": [column[place] for place in order], "kind": "points", "slot": slot})
    return {
        "x": _round_numbers(x[order]),
        "x_label": "FLOP per byte",
        "y_label": "TFLOP/s",
        "log_x": True,
        "log_y": True,
        "series": series,
    }


class RooflinePoint:
    """One distinct call of a step: its family, kind and type, how often it runs, seconds, operations and bytes."""

    __slots__ = ("compute", "count", "family", "flops", "kind", "nbytes", "seconds")

    def __init__(
        self, family: str, kind: str, compute: str, count: int, seconds: float, flops: float, nbytes: float
    ) -> None:
        self.family, self.kind, self.compute, self.count = family, kind, compute, count
        self.seconds, self.flops, self.nbytes = seconds, flops, nbytes

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.nbytes


def find_roofline_points(timeline: Timeline) -> list[RooflinePoint]:
    """Every distinct call with arithmetic in it, those with most device time first; times are those of one launch."""
    number = timeline.schedule.call[timeline.launches]
    count = np.bincount(number, minlength=len(timeline.calls))
    total = np.bincount(number, weights=timeline.kernel_seconds, minlength=len(timeline.calls))
    points = []
    for index in np.argsort(-total, kind="stable").tolist():
        call = timeline.calls[index]
        done = count_work(Calls.of(call.family, [call])) if count[index] and total[index] > 0 else None
        if done is None or not done[0][0] > _LEAST_INTENSITY * done[1][0] > 0:
            continue
        each = float(total[index] / count[index])
        points.append(
            RooflinePoint(call.family.name, call.kind, call.compute, int(count[index]), each, float(done[0][0]),
                          float(done[1][0]))
        )  # fmt: skip
    return points


def _list_ceilings(points: Sequence[RooflinePoint], device: Device) -> list[tuple[str, float, float, int]]:
    """What the device holds under load, for every type that kernels compute in, and what its data sheet promises."""
    used = [name for name in dict.fromkeys(point.compute for point in points) if name in device.peak_flops] or ["fp32"]
    real = DRAM_SHARE * device.dram_bandwidth
    fastest = max(used, key=device.get_peak_flops)
    held = [(f"{name}, sustained", device.get_sustained_flops(name), real, 0) for name in used]
    return [*held, (f"{fastest}, data sheet", device.get_peak_flops(fastest), device.dram_bandwidth, 1)]


def _round_numbers(values: FloatArray) -> list[float]:
    """Plain numbers of five digits, which is more than a chart shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]


Event = dict[str, Any]
MOST_SLICES = 60_000
"""Of one page: about a megabyte. Beyond, the shortest are left out, and the page says how many."""
_NS = 1000  # in a microsecond
_UNFOLDED = 2  # ranks that are shown of many until a reader asks for all
_CRITICAL = "critical"
_ON_RANK = re.compile(r"(rank \d+)(?:: |, )")  # how slices of a path over ranks begin


@dataclass
class _Track:
    """Slices of one host thread or stream. `side` is "host" or "device", `origin` measured, predicted or ""."""

    rank: str
    side: str
    origin: str
    label: str
    slices: list[Event] = field(default_factory=list)


@dataclass
class _Words:
    """Strings by number, each once."""

    number: dict[str, int] = field(default_factory=dict)

    def of(self, word: str) -> int:
        return self.number.setdefault(word, len(self.number))


def make_timeline_data(
    document: dict[str, Any], *, skipped: Sequence[str] = (), most: int | None = None, period: float | None = None
) -> dict[str, Any]:
    """The tracks of a Chrome trace document, with its critical path told apart; tracks of an origin in `skipped`
    (such as "replayed") are left out, and of more than `most` slices the shortest. Times become nanoseconds from the
    first slice. With a `period` (seconds of a step that is one of many) the timeline is as long as it: it ends where
    the path does, and what a neighbouring step does meanwhile is drawn in its place."""
    events = document["traceEvents"]
    tracks, path = _list_tracks(events, skipped)
    begin = min((s["ts"] for track in tracks for s in track.slices), default=0.0)
    if period:
        ends = [s["ts"] + s["dur"] for _, s in path] or [s["ts"] + s["dur"] for t in tracks for s in t.slices]
        begin = max(ends, default=0.0) - 1e6 * period
        for track in tracks:
            track.slices = [part for s in track.slices for part in _wrap_slice(s, begin, 1e6 * period)]
        path = [(rank, part) for rank, s in path for part in _wrap_slice(s, begin, 1e6 * period)]
    limit, left_out = _find_shortest_shown([s["dur"] for track in tracks for s in track.slices], most or MOST_SLICES)
    words, kinds = _Words(), _Words()
    several = len({track.rank for track in tracks}) > 1, len({track.origin for track in tracks}) > 1
    shown = [_make_columns(track, begin, limit, words, kinds, several) for track in tracks]
    segments = _list_segments(path, tracks, begin, words)
    folded = _choose_folded([track.rank for track in tracks], segments)
    shown = [track | {"folded": own.rank in folded} for track, own in zip(shown, tracks, strict=True)]
    ends = [start + length for _, start, length, _ in segments] + [max(track["end"], 0) for track in shown]
    return {
        "type": "timeline", "tracks": shown, "names": list(words.number), "kinds": list(kinds.number),
        "path": segments, "end": max(ends, default=0), "left_out": left_out,
    }  # fmt: skip


def _list_tracks(events: Iterable[Event], skipped: Sequence[str]) -> tuple[list[_Track], list[tuple[str, Event]]]:
    """Tracks in reading order (rank; host before device; a stream measured, then predicted), and the path's slices
    with their rank."""
    events = list(events)
    process = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], _Track] = {}
    path: list[tuple[str, Event]] = []
    for event in events:
        if event["ph"] != "X":
            continue
        rank, _, what = process.get(event["pid"], "device").rpartition(": ")
        side, _, origin = what.partition(", ")
        if event["cat"] == _CRITICAL:
            path.append((rank, event))
        elif origin not in skipped:
            place = event["pid"], event["tid"]
            label = thread.get(place, str(event["tid"]))
            tracks.setdefault(place, _Track(rank, side, origin, label)).slices.append(event)
    ranks = {rank: number for number, rank in enumerate(dict.fromkeys(t.rank for t in tracks.values()))}
    order = sorted(tracks.items(), key=lambda item: (
        ranks[item[1].rank], item[1].side != "host", item[0][1] if item[1].side == "device" else 0, item[0],
    ))  # fmt: skip
    return [track for _, track in order], path


def _wrap_slice(event: Event, begin: float, period: float) -> list[Event]:
    """A slice (microseconds) where a step that begins at `begin` and is repeated every `period` has it: moved by whole
    periods, in two parts where it reaches beyond the end."""
    away = math.floor((event["ts"] - begin) / period + 1e-6)
    start, length = max(event["ts"] - away * period, begin), min(event["dur"], period)
    whose = {"step": "the next" if away < 0 else "the one before"} if away else {}
    moved = {**event, "ts": start, "dur": length, "args": {**event.get("args", {}), **whose}}
    over = start + length - (begin + period)
    if over <= 1e-6 * period:
        return [moved]
    rest = {"ts": begin, "dur": over, "args": {**event.get("args", {}), "step": "the one before, its end"}}
    return [{**moved, "dur": length - over}, {**event, **rest}]


def _choose_folded(ranks: Sequence[str], segments: Sequence[Sequence[int]]) -> set[str]:
    """Ranks whose tracks begin folded away, where there are many: all but those that the path is on for longest."""
    spent = dict.fromkeys(ranks, 0)
    for track, _, length, _ in segments:
        spent[ranks[track]] += length
    ordered = sorted(spent, key=lambda rank: -spent[rank])
    return set(ordered[_UNFOLDED:]) if len(ordered) > _UNFOLDED + 1 else set()


def _find_shortest_shown(lengths: Sequence[float], most: int) -> tuple[float, int]:
    """The length from which slices are shown, and how many are left out."""
    if len(lengths) <= most:
        return -1.0, 0
    limit = float(np.partition(np.array(lengths), len(lengths) - most)[len(lengths) - most])
    return limit, sum(length < limit for length in lengths)


def _make_columns(
    track: _Track, begin: float, limit: float, words: _Words, kinds: _Words, several: tuple[bool, bool]
) -> dict[str, Any]:
    """The slices of a track; its title names rank and origin where there are `several` of them."""
    slices = sorted((s for s in track.slices if s["dur"] >= limit), key=lambda s: (s["ts"], -s["dur"]))
    starts = [round(_NS * (s["ts"] - begin)) for s in slices]
    lengths = [round(_NS * s["dur"]) for s in slices]
    rank = re.sub(r" and (\d+) like it", r" (+\1)", track.rank)  # as much as the narrow margin can hold
    side = "" if rank and track.label.startswith(("stream", "thread")) else track.side
    parts = (rank if several[0] else "", side, track.label, track.origin if several[1] else "")
    title = ", ".join(part for part in parts if part)
    return {
        "title": title, "side": track.side, "origin": track.origin,
        "start": np.diff(starts, prepend=0).tolist() if starts else [],
        "length": lengths,
        "name": [words.of(s["name"]) for s in slices],
        "kind": [kinds.of("host" if track.side == "host" else _find_kind(s)) for s in slices],
        "detail": [words.of(_describe_slice(s)) for s in slices],
        "end": max((start + length for start, length in zip(starts, lengths, strict=True)), default=0),
    }  # fmt: skip


def _find_kind(event: Event) -> str:
    """The family of a kernel; measured ones are told by their names."""
    return find_kernel_family(event["name"]) if event["cat"] == "kernel" else str(event["cat"])


def _describe_slice(event: Event) -> str:
    """What else is known of a slice: its op and sizes."""
    return ", ".join(f"{name} {value}" for name, value in event.get("args", {}).items())


def _list_segments(path: list[tuple[str, Event]], tracks: list[_Track], begin: float, words: _Words) -> list[list[int]]:
    """Where the path runs: [track, start, length, name], the track that has a slice there of the path's side."""
    spans = [_list_spans(track) for track in tracks]
    over_ranks = [slice_ for slice_ in path if not slice_[0]]
    segments = []
    for rank, event in over_ranks or path:
        owner, label = _find_place(rank, event)
        wanted = "host" if label.startswith("host") else "device"
        middle = event["ts"] + event["dur"] / 2
        fitting = [
            number
            for number, track in enumerate(tracks)
            if track.side == wanted and track.origin != "predicted" and _is_same_rank(owner, track.rank)
        ]
        covering = [number for number in fitting if _is_covered(spans[number], middle)]
        if fitting:
            start, length = round(_NS * (event["ts"] - begin)), round(_NS * event["dur"])
            segments.append([(covering or fitting)[0], start, length, words.of(label)])
    return segments


def _find_place(rank: str, event: Event) -> tuple[str, str]:
    """The rank that a slice of the path is on ("" where there is one rank only), and its label without it."""
    if rank:
        return rank, event["name"]
    match = _ON_RANK.match(event["name"])
    return (match[1], event["name"][match.end() :]) if match else ("", event["name"])


def _is_same_rank(owner: str, rank: str) -> bool:
    """Whether tracks called `rank` ("rank 0 and 3 like it") are those of the path's rank."""
    return rank.partition(" and ")[0] == owner


def _list_spans(track: _Track) -> tuple[Any, Any]:
    starts = np.array(sorted((s["ts"], s["ts"] + s["dur"]) for s in track.slices)).reshape(-1, 2)
    return starts[:, 0], np.maximum.accumulate(starts[:, 1]) if len(starts) else starts[:, 1]


def _is_covered(spans: tuple[Any, Any], moment: float) -> bool:
    """Whether some slice is open at a moment (or one before it still is)."""
    at = int(np.searchsorted(spans[0], moment, side="right")) - 1
    return at >= 0 and bool(spans[1][at] >= moment)
