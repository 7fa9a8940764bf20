"""What measured traces say, as text."""

from __future__ import annotations

import numpy as np

from traincast.display.text import bar, milliseconds, table
from traincast.replay.results import RankReport, TraceReport
from traincast.report.attribution import OVERHEAD_NAMES, attribution_text
from traincast.report.measured_path import path_text
from traincast.report.measured_ranks import together_text
from traincast.traces.breakdown import PARTS, StepBreakdown

_PART_NAMES = (
    "compute", "exposed communication", "idle: host-bound", "idle: host in a synchronisation",
    "idle: a stream waited for another", "idle: before graph nodes", "idle: launched, not yet started",
)  # fmt: skip
_LEAST_EVIDENCE = 0.01  # share of the step: less idle time than this needs no explanation
_TOP = 8  # rows of a table: a page shows the largest, JSON all


def measured_text(report: TraceReport) -> str:
    """A page per rank, and the figures over ranks."""
    pages = [_rank_text(rank) for rank in report.ranks]
    if report.together:
        pages.append(together_text(report.together))
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
        lines += ["", attribution_text(linked.trace.device_name, rank.attribution)]
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


def _parts(rank: RankReport) -> list[str]:
    step = rank.median_step
    rows = [(label, getattr(step, name)) for name, label in zip(PARTS, _PART_NAMES, strict=True)]
    lines = [
        f"  {label:<34} {milliseconds(s):>8} ms {_share(s, step):>4.0%}  {bar(_share(s, step))}" for label, s in rows
    ]
    labels = dict(zip(PARTS, _PART_NAMES, strict=True))
    most = [
        f"    {labels[reason]}: most of it before {what[:60]}"
        for reason, what in step.evidence.items()
        if _share(getattr(step, reason), step) >= _LEAST_EVIDENCE
    ]
    return [*lines, *most]


def _top(title: str, rank: RankReport, attribute: str) -> list[str]:
    step = rank.median_step
    totals: dict[str, float] = getattr(step, attribute)
    shown = list(totals.items())[:_TOP]
    lines = [f"{title} (device time of the median step)"]
    lines += [f"  {name[:40]:<40} {milliseconds(s):>8} ms  {bar(_share(s, step))}" for name, s in shown]
    rest = sum(list(totals.values())[_TOP:])
    return [*lines, f"  {'the rest':<40} {milliseconds(rest):>8} ms"] if rest else lines


def _overheads_table(rank: RankReport) -> str:
    header = ("host overhead", "per step ms", "count", "mean us", "median us", "p95 us", "most of it in")
    rows = []
    for kind, label in OVERHEAD_NAMES.items():
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
