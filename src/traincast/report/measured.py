"""What measured traces say, as text and as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from traincast.display.text import bar, milliseconds, table
from traincast.replay.analysis import RankReport, TraceReport
from traincast.report.attribution import attribution_json, attribution_text
from traincast.report.measured_path import path_json, path_text
from traincast.report.measured_ranks import together_json, together_text
from traincast.traces.breakdown import StepBreakdown

_PARTS = (
    ("compute", "compute"), ("exposed_comm", "exposed communication"), ("host_bound", "idle: host-bound"),
    ("synchronised", "idle: after a synchronisation"), ("event_wait", "idle: a stream waited for another"),
    ("launch_latency", "idle: launched, not yet started"),
)  # fmt: skip
_TOP = 8


def measured_text(report: TraceReport) -> str:
    """A page per rank, and the figures over ranks."""
    pages = [_rank_text(rank) for rank in report.ranks]
    if report.together:
        pages.append(together_text([rank.rank for rank in report.ranks], report.together))
    return "\n\n".join(pages)


def _rank_text(rank: RankReport) -> str:
    linked = rank.linked
    title = f"Rank {rank.rank}: {linked.trace.path.name}"
    if linked.trace.device_name:
        title += f", {linked.trace.device_name}"
    lines = [title, *(f"  note: {note}" for note in rank.notes), ""]
    lines += [
        _steps_table(rank),
        "",
        "Where the median step goes",
        *_parts(rank),
        "",
        *_top("Kernels", rank, "by_family"),
    ]
    lines += ["", *_top("Ops", rank, "by_op"), "", _overheads_table(rank)]
    if rank.collectives:
        lines += ["", _collectives_table(rank)]
    if rank.slowdowns:
        lines += ["", "Beside a collective, against the same kernels alone", _slowdowns_table(rank)]
    lines += ["", path_text(rank.path)]
    if rank.attribution:
        lines += ["", attribution_text(linked, rank.attribution)]
    return "\n".join(lines)


def _steps_table(rank: RankReport) -> str:
    header = ("step", "ms", "active", "idle", "exposed comm", "kernels", "replayed ms", "error")
    rows = [
        (
            str(b.number), milliseconds(b.step), f"{_share(b.active, b):.0%}", f"{_share(b.idle, b):.0%}",
            f"{b.eg_comm:.1%}", str(b.kernels), milliseconds(r.walked), f"{r.error:+.2%}",
        )
        for b, r in zip(rank.steps, rank.replay.steps, strict=True)
    ]  # fmt: skip
    return table(header, rows, right=range(8))


def _share(seconds: float, step: StepBreakdown) -> float:
    return seconds / step.step if step.step else 0.0


def _median_step(rank: RankReport) -> StepBreakdown:
    order = np.argsort([step.step for step in rank.steps], kind="stable")
    return rank.steps[int(order[len(order) // 2])]


def _parts(rank: RankReport) -> list[str]:
    step = _median_step(rank)
    rows = [(label, getattr(step, name)) for name, label in _PARTS]
    return [
        f"  {label:<32} {milliseconds(s):>8} ms {_share(s, step):>4.0%}  {bar(_share(s, step))}" for label, s in rows
    ]


def _top(title: str, rank: RankReport, attribute: str) -> list[str]:
    step = _median_step(rank)
    totals: dict[str, float] = getattr(step, attribute)
    shown = list(totals.items())[:_TOP]
    lines = [f"{title} (device time of the median step)"]
    lines += [f"  {name[:40]:<40} {milliseconds(s):>8} ms  {bar(_share(s, step))}" for name, s in shown]
    rest = sum(list(totals.values())[_TOP:])
    return [*lines, f"  {'the rest':<40} {milliseconds(rest):>8} ms"] if rest else lines


def _overheads_table(rank: RankReport) -> str:
    header = ("host overhead", "per step ms", "count", "mean us", "median us", "p95 us", "most of it in")
    labels = {
        "T1": "T1 between ops", "T2": "T2 before launch", "T3": "T3 after launch", "T4": "T4 runtime calls",
        "T5": "T5 between launches", "alone": "T5 ops without launch",
    }  # fmt: skip
    rows = []
    for kind, label in labels.items():
        by_name = rank.overheads.of_type(kind)
        if not by_name:
            continue
        largest = next(iter(by_name))
        total = sum(d.total for d in by_name.values())
        summary = by_name[largest].summary_us()
        rows.append(
            (label, milliseconds(total / len(rank.steps)), str(sum(d.count for d in by_name.values())),
             f"{summary['mean']:.1f}", f"{summary['median']:.1f}", f"{summary['p95']:.1f}", largest[:36] or "-")
        )  # fmt: skip
    return table(header, rows, right=(1, 2, 3, 4, 5))


def _collectives_table(rank: RankReport) -> str:
    groups: dict[tuple[str, int, str], list[float]] = {}
    for c in rank.collectives:
        groups.setdefault((c.kind, c.message_bytes, c.group or "-"), []).append(c.seconds)
    shown = sorted(groups.items(), key=lambda item: -sum(item[1]))[:_TOP]
    rows = [
        (kind, f"{size:,}" if size >= 0 else "?", group, str(len(times)), milliseconds(float(np.median(times))))
        for (kind, size, group), times in shown
    ]
    return table(("collective", "bytes", "group", "count", "median ms"), rows, right=(1, 3, 4))


def _slowdowns_table(rank: RankReport) -> str:
    rows = [
        (name, str(s.count), f"{s.ratio:.2f}", *(f"{quartile:.2f}" for quartile in s.quartiles))
        for name, s in rank.slowdowns.items()
    ]
    return table(("family", "kernels", "times as long", "1st quartile", "median", "3rd"), rows, right=range(1, 6))


def measured_json(report: TraceReport) -> dict[str, Any]:
    """Everything, in milliseconds and microseconds as the names say."""
    return {
        "ranks": [_rank_json(rank) for rank in report.ranks],
        "together": report.together and together_json([rank.rank for rank in report.ranks], report.together),
    }


def _rank_json(rank: RankReport) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "file": str(rank.linked.trace.path),
        "device": rank.linked.trace.device_name,
        "marked": rank.linked.marked,
        "notes": list(rank.notes),
        "joined_ops": rank.joined,
        "steps": [
            {
                "number": b.number, "iteration_ms": 1e3 * b.step, "device_active_ms": 1e3 * b.active,
                "communication_ms": 1e3 * b.communication, "eg_comm": b.eg_comm, "kernels": b.kernels,
                **{f"{name}_ms": 1e3 * getattr(b, name) for name, _ in _PARTS}, "idle_ms": 1e3 * b.idle,
                "by_family_ms": {k: 1e3 * v for k, v in b.by_family.items()},
                "by_op_ms": {k: 1e3 * v for k, v in b.by_op.items()},
                "replayed_ms": 1e3 * r.walked, "replay_error": r.error,
            }
            for b, r in zip(rank.steps, rank.replay.steps, strict=True)
        ],
        "overheads_us": {
            kind: {name: d.summary_us() for name, d in rank.overheads.of_type(kind).items()}
            for kind in ("T1", "T2", "T3", "T4", "T5", "alone")
        },
        "collectives": [
            {
                "kind": c.kind, "latency_us": 1e6 * c.seconds, "message_bytes": c.message_bytes, "step": c.step,
                "group": c.group, "group_size": c.group_size, "group_ranks": list(c.group_ranks),
                "in_splits": list(c.in_splits), "out_splits": list(c.out_splits),
            }
            for c in rank.collectives
        ],
        "beside_collectives": {
            name: {"count": s.count, "ratio": s.ratio, "quartiles": list(s.quartiles)}
            for name, s in rank.slowdowns.items()
        },
        "critical_path": path_json(rank.path),
        "prediction": rank.attribution and attribution_json(rank.linked, rank.attribution),
    }  # fmt: skip
