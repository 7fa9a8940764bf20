"""Timelines for a page: tracks of slices as columns of whole nanoseconds, made from the events of a Chrome trace."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from traincast.traces.classify import find_kernel_family

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
    shown = [_make_columns(track, begin, limit, words, kinds) for track in tracks]
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


def _make_columns(track: _Track, begin: float, limit: float, words: _Words, kinds: _Words) -> dict[str, Any]:
    slices = sorted((s for s in track.slices if s["dur"] >= limit), key=lambda s: (s["ts"], -s["dur"]))
    starts = [round(_NS * (s["ts"] - begin)) for s in slices]
    lengths = [round(_NS * s["dur"]) for s in slices]
    rank = re.sub(r" and (\d+) like it", r" (+\1)", track.rank)  # as much as the narrow margin can hold
    side = "" if rank and track.label.startswith(("stream", "thread")) else track.side
    title = ", ".join(part for part in (rank, side, track.label, track.origin) if part)
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
