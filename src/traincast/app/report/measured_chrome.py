"""Measured, replayed and predicted timelines one under the other, as Chrome trace JSON for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traincast.app.report.chrome import untangle_slices
from traincast.traces.replay.path import RanksPath
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.traces.replay.steps import Replay
from traincast.traces.replay.together import RanksReplay

_HOST, _MEASURED, _REPLAYED = "host, measured", "device, measured", "device, replayed"
_PREDICTED, _PATH = "device, predicted", "critical path"
_PER_RANK = 5  # process numbers of one rank, one for each of these tracks


def make_measured_chrome_trace(report: TraceReport) -> dict[str, Any]:
    """The trace document. Times are microseconds from the begin of the first rank, on a clock that ranks share; ranks
    whose collectives could not be matched, and a rank alone, count from their own first step."""
    together = report.together.replay if report.together else None
    begins = together.simulation.schedule.begin.tolist() if together else [0.0] * len(report.ranks)
    events: list[dict[str, Any]] = []
    for index, (rank, begin) in enumerate(zip(report.ranks, begins, strict=True)):
        simulated = together.ranks[index].replay if together else rank.replay
        predicted = rank.attribution.full if rank.attribution else None
        if report.together and report.together.prediction:
            predicted = report.together.prediction.full[index]
        events += _shift_events(_make_rank(rank, index, simulated, predicted), 1e6 * begin)
    if together:
        events += _list_collectives(report.ranks, together)
    if report.together and report.together.path:
        events += _make_ranks_path(report.together.path, _PER_RANK * len(report.ranks))
    return {"traceEvents": untangle_slices(events), "displayTimeUnit": "ms"}


def _make_rank(rank: RankReport, index: int, simulated: Replay, predicted: Replay | None) -> list[dict[str, Any]]:
    tracks = (_HOST, _MEASURED, _REPLAYED, *((_PREDICTED,) if predicted else ()), _PATH)
    pids = {name: _PER_RANK * index + order for order, name in enumerate(tracks)}
    events = [event for name, pid in pids.items() for event in _name_process(pid, f"rank {rank.rank}: {name}")]
    events += [
        *_list_host_ops(rank, pids[_HOST]),
        *_list_measured_kernels(rank, pids),
        *_list_simulated_kernels(rank, simulated, pids[_REPLAYED]),
    ]
    if predicted:
        events += _list_simulated_kernels(rank, predicted, pids[_PREDICTED])
    return [*events, *_make_path(rank, pids[_PATH])]


def _name_process(pid: int, name: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]


def _shift_events(events: list[dict[str, Any]], by_us: float) -> list[dict[str, Any]]:
    return [{**event, "ts": round(event["ts"] + by_us, 3)} if "ts" in event else event for event in events]


def _list_collectives(ranks: Sequence[RankReport], together: RanksReplay) -> list[dict[str, Any]]:
    """At the moment a collective's last rank comes, an arrow from it to every rank that waited."""
    begins = together.simulation.schedule.begin
    events: list[dict[str, Any]] = []
    for number, match in enumerate(together.matches.collectives):
        starts = [
            1e6 * float(begins[m]) + 1e-3 * (int(ranks[m].linked.events["start"][c.row]) - ranks[m].replay.origin)
            for m, c in zip(match.members, match.calls, strict=True)
        ]
        last = int(np.argmax(starts))
        moment = round(starts[last], 3)
        for place, (member, call) in enumerate(zip(match.members, match.calls, strict=True)):
            if place != last:
                flow = {"cat": "collective", "name": match.kind, "id": (number << 20) + member, "ts": moment}
                late, waits = (_PER_RANK * match.members[last] + 1, match.calls[last].stream), _PER_RANK * member + 1
                events.append({"ph": "s", "pid": late[0], "tid": late[1], **flow})
                events.append({"ph": "f", "bp": "e", "pid": waits, "tid": call.stream, **flow})
    return events


def _make_ranks_path(path: RanksPath, pid: int) -> list[dict[str, Any]]:
    """The critical path over all ranks, a track of its own."""
    slices = [
        _make_slice(pid, 0, f"rank {s.rank}, {s.what}: {s.name}", "critical", 1e6 * s.start, 1e6 * (s.end - s.start))
        for s in path.segments
    ]
    return [*_name_process(pid, "critical path over ranks"), *slices]


def _make_slice(pid: int, tid: int, name: str, category: str, start_us: float, length_us: float) -> dict[str, Any]:
    """A slice whose start and end are rounded to nanoseconds, so that one that begins where another ends still does."""
    start, end = round(start_us, 3), round(start_us + length_us, 3)
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": start, "dur": round(end - start, 3),
    }  # fmt: skip


def _list_host_ops(rank: RankReport, pid: int) -> list[dict[str, Any]]:
    linked, origin = rank.linked, rank.replay.origin
    slices = [
        _make_slice(
            pid,
            int(linked.thread[row]),
            linked.get_name(row),
            "op",
            1e-3 * (int(linked.events["start"][row]) - origin),
            1e-3 * int(linked.events["duration"][row]),
        )
        for row in linked.scopes.tolist()
    ]
    steps = [
        _make_slice(pid, 1000, f"step {step.number}", "step", 1e-3 * (step.start - origin), 1e6 * step.seconds)
        for step in linked.steps
    ]
    return [*steps, *slices]


def _list_measured_kernels(rank: RankReport, pids: dict[str, int]) -> list[dict[str, Any]]:
    """Kernels, with an arrow from the call that launched each."""
    linked, origin = rank.linked, rank.replay.origin
    events: list[dict[str, Any]] = []
    for row in linked.device.tolist():
        stream, start = int(linked.events["stream"][row]), 1e-3 * (int(linked.events["start"][row]) - origin)
        length = 1e-3 * int(linked.events["duration"][row])
        events.append(_make_slice(pids[_MEASURED], stream, linked.get_name(row), "kernel", start, length))
        launch = int(linked.launch[row])
        if launch >= 0:
            flow = {"cat": "launch", "name": "launch", "id": (pids[_HOST] << 32) + row}
            issued = round(1e-3 * (int(linked.events["start"][launch]) - origin), 3)
            thread = int(linked.thread[launch])
            events.append({"ph": "s", "pid": pids[_HOST], "tid": thread, "ts": issued, **flow})
            events.append({"ph": "f", "bp": "e", "pid": pids[_MEASURED], "tid": stream, "ts": round(start, 3), **flow})
    return events


def _list_simulated_kernels(rank: RankReport, replay: Replay, pid: int) -> list[dict[str, Any]]:
    """Kernels as a simulation placed them."""
    linked = rank.linked
    rows, starts, ends = replay.kernel_row.tolist(), replay.kernel_start.tolist(), replay.kernel_end.tolist()
    return [
        _make_slice(
            pid, int(linked.events["stream"][row]), linked.get_name(row), "kernel", 1e6 * start, 1e6 * (end - start)
        )
        for row, start, end in zip(rows, starts, ends, strict=True)
    ]


def _make_path(rank: RankReport, pid: int) -> list[dict[str, Any]]:
    """The critical path, a track of its own."""
    return [
        _make_slice(pid, 0, f"{s.what}: {s.name}", "critical", 1e6 * s.start, 1e6 * (s.end - s.start))
        for s in rank.path.segments
    ]
