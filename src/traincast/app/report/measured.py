"""What measured traces say, as text."""

from __future__ import annotations

import textwrap
from functools import reduce

from traincast.app.report.attribution import MOST_STEPS, OVERHEAD_NAMES, format_attribution, format_forecast
from traincast.app.report.measured_profile import format_communication, format_profile
from traincast.app.report.measured_ranks import format_together
from traincast.app.report.measured_verdict import PART_NAMES, format_path_shares, state_traces
from traincast.traces.breakdown import NO_OP, REASONS, StepBreakdown
from traincast.traces.overheads.extraction import Distribution
from traincast.traces.replay.compare import find_slowest_rank
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.utils.display.text import format_bar, format_milliseconds, format_table, shorten_name

_LEAST_EVIDENCE = 0.01  # share of the step: less idle time than this needs no explanation
TOP = 8
"""Rows of a table, unless another number is asked for: a page shows the largest, JSON all."""
_WIDTH = 100  # letters of a line of notes
_SHORT = 5  # rows of a table on the first screen


def format_measured(report: TraceReport, top: int = TOP, *, full: bool = False) -> str:
    """The verdict, where the step goes and what holds it; `full` a page per rank with at most `top` rows of each table,
    and the figures over ranks."""
    rank = find_slowest_rank(report)
    said = format_forecast(rank.attribution) if rank.attribution else []
    measured = state_traces(report)
    forecast = rank.attribution is not None and rank.attribution.is_forecast
    pages = ["\n".join([*said, *measured] if forecast else [*measured, *said])]
    if full:
        pages += [_format_rank(rank, top) for rank in report.ranks]
    else:
        pages += [_format_short(rank, top)]
    if not report.is_one_job:
        pages.append(_format_traces(report))
    elif report.together:
        pages.append(format_together(report.together, top, full=full))
    return "\n\n".join(pages)


def _format_traces(report: TraceReport) -> str:
    """A line for each of several traces that have nothing to do with each other."""
    rows = [
        (rank.linked.trace.path.name, rank.linked.trace.device_name or "-", format_milliseconds(rank.median_step.step),
         f"{_divide_by_step(rank.median_step.active, rank.median_step):.0%}")
        for rank in report.ranks
    ]  # fmt: skip
    return format_table(("trace", "GPU", "ms per step", "busy"), rows, right=(2, 3))


def _format_short(rank: RankReport, top: int) -> str:
    """One screen about a rank: its parts, kernels and critical path."""
    lines = [f"Rank {rank.rank}: {rank.linked.trace.path.name}", *map(_format_note, rank.notes)]
    lines += ["", "Where the median step goes", *_format_parts(rank)]
    if len(rank.linked.device):
        lines += ["", *_format_top("Kernels", rank, "by_family", min(top, _SHORT))]
    if rank.path.by_what:
        lines += ["", format_path_shares(rank.path, most=_SHORT)]
    return "\n".join(lines)


def _format_note(text: str) -> str:
    """A note in lines that a terminal shows whole."""
    return textwrap.fill(text, _WIDTH, initial_indent="  note: ", subsequent_indent="        ")


def _format_rank(rank: RankReport, top: int) -> str:
    linked = rank.linked
    title = f"Rank {rank.rank}: {linked.trace.path.name}"
    if linked.trace.device_name:
        title += f", {linked.trace.device_name}"
    lines = [title, *map(_format_note, rank.notes), ""]
    lines += [
        _format_steps(rank),
        "",
        "Where the median step goes",
        *_format_parts(rank),
    ]
    if len(linked.device):
        lines += ["", *_format_top("Kernels", rank, "by_family", top)]
    if any(step.by_op.keys() - {NO_OP} for step in rank.steps):
        lines += ["", *_format_top("Ops", rank, "by_op", top)]
    lines += format_profile(rank, top)
    if rank.overheads.table:
        lines += ["", _format_overheads(rank)]
    if rank.collectives:
        lines += ["", format_communication(rank, top)]
    if rank.slowdowns:
        lines += ["", "Alongside a collective, against the same kernels alone", _format_slowdowns(rank)]
    if rank.path.by_what:
        lines += ["", format_path_shares(rank.path)]
    if rank.attribution:
        lines += ["", format_attribution(rank.attribution)]
    return "\n".join(lines)


def _format_steps(rank: RankReport) -> str:
    header = ("step", "ms", "active", "idle", "exposed comm", "kernels", "replayed ms", "error")
    rows = [
        (
            str(b.number),
            format_milliseconds(b.step),
            f"{_divide_by_step(b.active, b):.0%}",
            f"{_divide_by_step(b.idle, b):.0%}",
            f"{b.eg_comm:.1%}",
            str(b.kernels),
            format_milliseconds(r.walked),
            f"{r.error:+.2%}",
        )
        for b, r in zip(rank.steps[:MOST_STEPS], rank.replay.steps[:MOST_STEPS], strict=True)
    ]
    shown, rest = format_table(header, rows, right=range(8)), len(rank.steps) - len(rows)
    if not rest:
        return shown
    lengths = sorted(step.step for step in rank.steps)
    least, middle, most = (format_milliseconds(lengths[place]) for place in (0, len(lengths) // 2, -1))
    return f"{shown}\n  {rest} more in the JSON; of all: shortest {least}, median {middle}, longest {most} ms"


def _divide_by_step(seconds: float, step: StepBreakdown) -> float:
    return seconds / step.step if step.step else 0.0


def _format_parts(rank: RankReport) -> list[str]:
    step = rank.median_step
    left_out = REASONS[:-1] if step.not_recorded else REASONS[-1:]
    rows = [(label, getattr(step, name)) for name, label in PART_NAMES.items() if name not in left_out]
    lines = [
        f"  {label:<34} {format_milliseconds(s):>8} ms {_divide_by_step(s, step):>4.0%}  "
        f"{format_bar(_divide_by_step(s, step))}"
        for label, s in rows
    ]
    most = [
        f"    {PART_NAMES[reason]}: most of it {step.describe_evidence(reason)}"
        for reason in step.evidence
        if _divide_by_step(getattr(step, reason), step) >= _LEAST_EVIDENCE
    ]
    return [*lines, *most]


def _format_top(title: str, rank: RankReport, attribute: str, top: int) -> list[str]:
    step = rank.median_step
    totals: dict[str, float] = getattr(step, attribute)
    shown = list(totals.items())[:top]
    lines = [f"{title} (device time of the median step)"]
    lines += [
        f"  {shorten_name(name, 40):<40} {format_milliseconds(s):>8} ms  {format_bar(_divide_by_step(s, step))}"
        for name, s in shown
    ]
    rest = sum(list(totals.values())[top:])
    return [*lines, f"  {'the rest':<40} {format_milliseconds(rest):>8} ms"] if rest else lines


def _format_overheads(rank: RankReport) -> str:
    header = ("host overhead", "per step ms", "count", "mean us", "median us", "p95 us", "most of it in")
    rows = []
    for kind, label in OVERHEAD_NAMES.items():
        by_name = rank.overheads.select_type(kind)
        if not by_name:
            continue
        largest = next(iter(by_name))
        whole = reduce(Distribution.merge_with, by_name.values())
        summary = whole.summarise_us()
        rows.append(
            (label, format_milliseconds(whole.total / len(rank.steps)), str(whole.count),
             f"{1e6 * whole.total / whole.count:.1f}", f"{summary['median']:.1f}", f"{summary['p95']:.1f}",
             shorten_name(largest, 36) or "-")
        )  # fmt: skip
    cost = rank.overheads.cost
    recorded = cost.sum_seconds(rank.linked) if cost else 0.0
    note = f"\n  without what recording adds: {format_milliseconds(recorded)} ms of a step" if recorded else ""
    return f"{format_table(header, rows, right=(1, 2, 3, 4, 5))}{note}"


def _format_slowdowns(rank: RankReport) -> str:
    rows = [
        (name, str(s.count), f"{s.ratio:.2f}", *(f"{quartile:.2f}" for quartile in s.quartiles))
        for name, s in rank.slowdowns.items()
    ]
    return format_table(
        ("family", "kernels", "times as long", "1st quartile", "median", "3rd"), rows, right=range(1, 6)
    )
