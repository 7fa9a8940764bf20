"""What measured traces say, of one rank or several, with the critical path and what faster parts would bring, as
text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import reduce

from traincast.app.report.compared import (
    MOST_STEPS,
    OVERHEAD_NAMES,
    PART_NAMES,
    format_attribution,
    format_forecast,
    format_gains,
    format_path_shares,
    state_traces,
)
from traincast.app.report.measured_profile import format_communication, format_profile, format_shared_communication
from traincast.traces.breakdown import NO_OP, REASONS, StepBreakdown
from traincast.traces.overheads.extraction import Distribution
from traincast.traces.replay.compare import find_slowest_rank
from traincast.traces.replay.path import RanksPath
from traincast.traces.replay.results import RankReport, TogetherReport, TraceReport
from traincast.traces.replay.together import RanksReplay, TracedRanksPrediction
from traincast.utils.display.text import count_of, format_bar, format_milliseconds, format_table, shorten_name

_SHORT = 5  # rows on the first screen
_MOST_RANKS = 32


def format_together(together: TogetherReport, top: int, *, full: bool = True) -> str:
    """The figures over ranks, their replay together, the path over them, and their prediction; unless `full` ranks in a
    line each and the path."""
    figures, numbers = together.breakdown, together.numbers
    parts = [
        f"All {len(numbers)} ranks: median step {format_milliseconds(figures.step)} ms, "
        f"exposed communication {figures.eg_comm:.1%}, imbalance {figures.eg_imbalance:.1%}",
        *(f"  note: {note}" for note in together.notes),
    ]
    if not full:
        parts += ["", _format_rank_lines(numbers, together.replay)] if together.replay else []
        return "\n".join([*parts, *(["", _format_path(together.path, _SHORT)] if together.path else [])])
    if together.exchanges:
        parts += [
            "",
            "Collectives over ranks (means of one call)",
            format_shared_communication(together.exchanges, top),
        ]
    if together.replay:
        parts += ["", _format_replay(numbers, together.replay)]
    if together.path:
        parts += ["", _format_path(together.path, top)]
    if together.prediction:
        parts += ["", _format_prediction(numbers, together.prediction)]
    return "\n".join(parts)


def _format_rank_lines(numbers: Sequence[int], replay: RanksReplay) -> str:
    """A line per rank: its mean step, exposed communication, how long it waited, and how often it came last."""
    rows = []
    for number, rank in list(zip(numbers, replay.ranks, strict=True))[:_MOST_RANKS]:
        count = len(rank.replay.steps) or 1
        step = sum(s.measured for s in rank.replay.steps) / count
        exposed = sum(measured for measured, _ in rank.exposed) / count
        times = (format_milliseconds(seconds) for seconds in (step, exposed, rank.waited))
        rows.append((str(number), *times, count_of(rank.last, "time")))
    header = ("rank", "ms per step", "exposed comm ms", "waited ms", "came last")
    return format_table(header, rows, right=range(5))


def _format_replay(numbers: Sequence[int], replay: RanksReplay) -> str:
    header = ("rank", "step", "ms", "replayed ms", "error", "exposed comm ms", "replayed ms", "waited ms", "came last")
    rows = [
        (
            str(number),
            str(s.number),
            format_milliseconds(s.measured),
            format_milliseconds(s.simulated),
            f"{s.error:+.2%}",
            format_milliseconds(measured),
            format_milliseconds(simulated),
            format_milliseconds(rank.waited) if not i else "",
            count_of(rank.last, "time") if not i else "",
        )
        for number, rank in zip(numbers, replay.ranks, strict=True)
        for i, (s, (measured, simulated)) in enumerate(zip(rank.replay.steps, rank.exposed, strict=True))
    ]
    measured, simulated = replay.slowest
    return "\n".join(
        [
            f"Replayed together: {len(replay.matches.collectives)} collectives end when the last rank has come and the "
            f"transfer is done (clocks agree to {1e6 * replay.matches.spread:.1f} us)",
            format_table(header, rows, right=range(9)),
            f"  slowest rank: {format_milliseconds(measured)} ms measured, {format_milliseconds(simulated)} replayed "
            f"({simulated / measured - 1:+.2%})",
        ]
    )


def _format_path(path: RanksPath, top: int) -> str:
    begin = f"rank {path.segments[0].rank}" if path.segments else "no rank"
    lines = [
        f"Critical path over ranks: begins on {begin}, {format_milliseconds(path.skew)} ms after the first rank began",
        *(f"  {f'rank {rank}':<48} {share:>6.1%}  {format_bar(share)}" for rank, share in path.by_rank.items()),
        "  of which under these ops:",
    ]
    places = list(path.by_place.items())[:top]
    names = {place: f"rank {place[0]}, {place[1] or 'between ops'}" for place, _ in places}
    lines += [f"    {shorten_name(names[place], 46):<46} {share:>6.1%}" for place, share in places]
    return "\n".join([
        *lines, "", "Twice as fast, the run over all ranks is shorter by", *format_gains(path.faster, width=48),
    ])  # fmt: skip


def _format_prediction(numbers: Sequence[int], prediction: TracedRanksPrediction) -> str:
    header = (
        "rank", "step", "measured ms", "predicted ms", prediction.difference, "= simulation", "+ kernels",
        "+ collectives", "+ overheads", "exposed comm ms", "predicted ms",
    )  # fmt: skip
    rows = [
        (
            str(number), str(s.number), format_milliseconds(s.measured), format_milliseconds(s.full), f"{s.error:+.1%}",
            *(f"{share:+.1%}" for share in s.compute_shares().values()),
            format_milliseconds(s.exposed_measured), format_milliseconds(s.exposed),
        )
        for number, steps in zip(numbers, prediction.steps, strict=True)
        for s in steps
    ]  # fmt: skip
    known = f"GMAE {prediction.gmae:.1%} of" if prediction.difference == "error" else "a forecast of"
    return "\n".join([
        f"Predicted together (collectives on {prediction.topology}; ranks begin when they did): "
        f"{known} {len(rows)} steps",
        format_table(header, rows, right=range(len(header))),
    ])  # fmt: skip


_LEAST_EVIDENCE = 0.01  # share of the step: less idle time than this needs no explanation
TOP = 8
"""Rows of a table, unless another number is asked for: a page shows the largest, JSON all."""
_WIDTH = 100  # letters of a line of notes


def format_measured(report: TraceReport, top: int = TOP, *, full: bool = False) -> str:
    """The verdict, the figures over ranks, and where the step of the slowest goes and what holds it; `full` a page per
    rank with at most `top` rows of each table."""
    rank = find_slowest_rank(report)
    said = format_forecast(rank.attribution) if rank.attribution else []
    measured = state_traces(report)
    forecast = rank.attribution is not None and rank.attribution.is_forecast
    pages = ["\n".join([*said, *measured] if forecast else [*measured, *said])]
    if not report.is_one_job:
        pages.append(_format_traces(report))
    elif report.together:
        pages.append(format_together(report.together, top, full=full))
    pages += [_format_rank(rank, top) for rank in report.ranks] if full else [_format_short(rank, top)]
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
            format_milliseconds(r.simulated),
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
