"""A timeline as Chrome trace JSON: host threads, device streams, launch flows and the critical path."""

from __future__ import annotations

from typing import Any

from traincast.simulate.critical import critical_path
from traincast.simulate.timeline import Timeline

_HOST, _DEVICE, _CRITICAL = 1, 2, 3


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace document; Perfetto and chrome://tracing open it. Times are microseconds from the step's start."""
    events = [*_names(timeline), *_host(timeline), *_device(timeline), *_critical(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _us(timeline: Timeline, seconds: float) -> float:
    return round(1e6 * (seconds - timeline.origin), 4)


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    schedule = timeline.schedule
    rows = [(_HOST, "host"), (_DEVICE, "device"), (_CRITICAL, "critical path")]
    events: list[dict[str, Any]] = []
    for order, (pid, name) in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}})
    tracks = [(_HOST, t, f"thread {t}" + (" (autograd)" if t == 1 else "")) for t in range(schedule.num_threads)]
    tracks += [(_DEVICE, s, f"stream {s}") for s in range(schedule.num_streams)]
    tracks += [(_CRITICAL, 0, "critical path")]
    for pid, tid, name in tracks:
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    return events


def _host(timeline: Timeline) -> list[dict[str, Any]]:
    """One slice per scope, from the start of its first instruction to the end of its last."""
    schedule, trace, program = timeline.schedule, timeline.trace, timeline.program
    last: dict[int, float] = {}
    slices: dict[int, list[float]] = {}
    for scope, thread, after in zip(
        schedule.scope.tolist(), schedule.thread.tolist(), trace.host_after.tolist(), strict=True
    ):
        begin = last.get(thread, timeline.origin)
        if scope in slices:
            slices[scope][1] = after
        else:
            slices[scope] = [begin, after]
        last[thread] = after
    scopes = program.scopes
    return [
        {
            "ph": "X", "pid": _HOST, "tid": scopes[scope].thread, "name": scopes[scope].name,
            "cat": scopes[scope].phase.name.lower(),
            "ts": _us(timeline, begin), "dur": round(1e6 * (end - begin), 4),
        }
        for scope, (begin, end) in slices.items()
    ]  # fmt: skip


def _device(timeline: Timeline) -> list[dict[str, Any]]:
    """One slice per launch, and a flow arrow from its launch call."""
    schedule, trace = timeline.schedule, timeline.trace
    signatures, op_signature = timeline.program.signatures, timeline.program.columns.op_signature
    events: list[dict[str, Any]] = []
    for k, instruction in enumerate(timeline.launches.tolist()):
        call = timeline.calls[schedule.call[instruction]]
        op = int(schedule.op[instruction])
        stream, thread = int(schedule.target[instruction]), int(schedule.thread[instruction])
        start = _us(timeline, trace.kernel_start[k])
        issue = _us(timeline, trace.host_issue[instruction])
        args = {"op": signatures[op_signature[op]].name, "compute": call.compute}
        args |= {name: f"{value:g}" for name, value in zip(call.family.fields, call.values, strict=True)}
        duration = round(1e6 * float(trace.kernel_end[k] - trace.kernel_start[k]), 4)
        flow = {"cat": "launch", "name": "launch", "id": k}
        events += [
            {"ph": "X", "pid": _DEVICE, "tid": stream, "name": f"{call.family.name}: {call.kind}",
             "cat": call.family.name, "ts": start, "dur": duration, "args": args},
            {"ph": "s", "pid": _HOST, "tid": thread, "ts": max(issue - 0.001, 0.0), **flow},
            {"ph": "f", "bp": "e", "pid": _DEVICE, "tid": stream, "ts": start, **flow},
        ]  # fmt: skip
    return events


def _critical(timeline: Timeline) -> list[dict[str, Any]]:
    events = []
    schedule, program = timeline.schedule, timeline.program
    for segment in critical_path(timeline):
        if segment.where == "device":
            call = timeline.calls[schedule.call[segment.instruction]]
            name = f"{call.family.name}: {call.kind}"
        else:
            name = f"host: {program.names[program.columns.scope_name[schedule.scope[segment.instruction]]]}"
        events.append(
            {"ph": "X", "pid": _CRITICAL, "tid": 0, "name": name, "cat": "critical",
             "ts": _us(timeline, segment.start), "dur": round(1e6 * segment.seconds, 4)}
        )  # fmt: skip
    return events
