"""Measured, replayed and predicted timelines one under the other, as Chrome trace JSON for Perfetto."""

from __future__ import annotations

from typing import Any

from traincast.simulate.measured import RankReport, TraceReport
from traincast.simulate.replay import Replay

_HOST, _MEASURED, _REPLAYED = "host, measured", "device, measured", "device, replayed"
_PREDICTED, _PATH = "device, predicted", "critical path"


def measured_chrome_trace(report: TraceReport) -> dict[str, Any]:
    """The trace document. Times are microseconds from the first step of each rank."""
    events: list[dict[str, Any]] = []
    for index, rank in enumerate(report.ranks):
        tracks = (_HOST, _MEASURED, _REPLAYED, *((_PREDICTED,) if rank.attribution else ()), _PATH)
        pids = {name: 5 * index + order for order, name in enumerate(tracks)}
        for name, pid in pids.items():
            label = {"name": f"rank {rank.rank}: {name}"}
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": label})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        events += [*_host(rank, pids[_HOST]), *_measured(rank, pids), *_walked(rank, rank.replay, pids[_REPLAYED])]
        if rank.attribution:
            events += _walked(rank, rank.attribution.full, pids[_PREDICTED])
        events += _path(rank, pids[_PATH])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(pid: int, tid: int, name: str, category: str, start_us: float, length_us: float) -> dict[str, Any]:
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": round(start_us, 3),
        "dur": round(length_us, 3),
    }  # fmt: skip


def _host(rank: RankReport, pid: int) -> list[dict[str, Any]]:
    linked, origin = rank.linked, rank.replay.origin
    slices = [
        _slice(pid, int(linked.thread[row]), linked.name(row), "op", 1e-3 * (int(linked.events["start"][row]) - origin),
               1e-3 * int(linked.events["duration"][row]))
        for row in linked.scopes.tolist()
    ]  # fmt: skip
    steps = [
        _slice(pid, 1000, f"step {step.number}", "step", 1e-3 * (step.start - origin), 1e6 * step.seconds)
        for step in linked.steps
    ]
    return [*steps, *slices]


def _measured(rank: RankReport, pids: dict[str, int]) -> list[dict[str, Any]]:
    """Kernels, with an arrow from the call that launched each."""
    linked, origin = rank.linked, rank.replay.origin
    events: list[dict[str, Any]] = []
    for row in linked.device.tolist():
        stream, start = int(linked.events["stream"][row]), 1e-3 * (int(linked.events["start"][row]) - origin)
        length = 1e-3 * int(linked.events["duration"][row])
        events.append(_slice(pids[_MEASURED], stream, linked.name(row), "kernel", start, length))
        launch = int(linked.launch[row])
        if launch >= 0:
            flow = {"cat": "launch", "name": "launch", "id": row}
            issued = round(1e-3 * (int(linked.events["start"][launch]) - origin), 3)
            thread = int(linked.thread[launch])
            events.append({"ph": "s", "pid": pids[_HOST], "tid": thread, "ts": issued, **flow})
            events.append({"ph": "f", "bp": "e", "pid": pids[_MEASURED], "tid": stream, "ts": round(start, 3), **flow})
    return events


def _walked(rank: RankReport, replay: Replay, pid: int) -> list[dict[str, Any]]:
    """Kernels as a walk placed them."""
    linked = rank.linked
    rows, starts, ends = replay.kernel_row.tolist(), replay.kernel_start.tolist(), replay.kernel_end.tolist()
    return [
        _slice(pid, int(linked.events["stream"][row]), linked.name(row), "kernel", 1e6 * start, 1e6 * (end - start))
        for row, start, end in zip(rows, starts, ends, strict=True)
    ]


def _path(rank: RankReport, pid: int) -> list[dict[str, Any]]:
    """The critical path, a track of its own."""
    return [
        _slice(pid, 0, f"{s.what}: {s.name}", "critical", 1e6 * s.start, 1e6 * (s.end - s.start))
        for s in rank.path.segments
    ]
