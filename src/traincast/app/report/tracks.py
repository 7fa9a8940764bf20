"""Slices of a Chrome trace put on tracks as Perfetto wants them: named, and none that overlaps another in part."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

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
