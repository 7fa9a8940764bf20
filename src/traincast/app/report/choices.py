"""Choices as text for the terminal: layouts, platforms side by side, scaling curves, whether a step fits."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from traincast.app.report.prediction import format_remarks
from traincast.planner.fitting import Fit, Remedy
from traincast.planner.parallelism.plan import Plan
from traincast.planner.what_if.money import PlatformComparison, PlatformStep
from traincast.simulator.prediction.result import Prediction, state_verdict
from traincast.simulator.scenario.scaling import ScalingCurve
from traincast.utils.display.text import (
    count_of,
    format_bar,
    format_count,
    format_dollars,
    format_duration,
    format_energy,
    format_gigabytes,
    format_interval,
    format_milliseconds,
    format_table,
)


def format_plan(plan: Plan) -> str:
    """The best layouts as a table, and what makes each slower than the first."""
    header = ["", "layout", "ms", "tokens/s/GPU", "MFU", "GB", "exposed ms"]
    header += ["$ per billion tokens"] if plan.price is not None else []
    header += ["days"] if plan.tokens is not None else []
    rows = []
    for number in range(len(plan.best)):
        row = plan.row(number)
        cells = [
            str(number + 1), row["layout"], f"{row['iteration_ms']:,.0f}", f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}", f"{row['memory_gb']:.0f}{_mark_fit(plan.best[number])}",
            f"{row['exposed_comm_ms']:,.0f}",
        ]  # fmt: skip
        cells += [format_dollars(row["dollars_per_billion_tokens"])] if plan.price is not None else []
        cells += [f"{row['days']:,.1f}"] if plan.tokens is not None else []
        rows.append([*cells, row["slower_by"]])
    right = (0, *range(2, len(header)))
    table = format_table([*header, "slower by"], rows, right=right)
    return "\n".join([*_state_plan(plan), "", table, "", "to predict the first:", f"  {plan.commands[0]}"])


def _mark_fit(result: Prediction) -> str:
    return "" if result.fits else ", too large"


def _state_plan(plan: Plan) -> list[str]:
    """The best layout, how long, whether it fits, what it costs, what it rests on; then what was searched."""
    best, row = plan.best[0], plan.row(0)
    searched, _ = plan.headline().split("\n")
    rate = f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU, MFU {row['mfu']:.1%}"
    length = "" if row["days"] is None else f"{format_duration(86400 * row['days'])} in all"
    dollars = "" if row["dollars"] is None else format_dollars(row["dollars"])
    whole = " and ".join(part for part in (length, dollars) if part)
    return [
        f"Best: {row['layout']}: {state_verdict(best)[0]}",
        f"{rate}{f'; {whole}' if whole else ''}. {best.trust.sentence}",
        searched,
    ]


_WIDTH = 30  # characters of the longest bar
_ROW, _LEFT, _BAR, _RIGHT, _TOP = 30, 170, 420, 230, 56  # pixels of the drawing


def format_platform_comparison(result: PlatformComparison) -> str:
    """The verdict, then a line per platform with its bar, then why others are not there."""
    rows = [_list_cells(result, step) for step in result.steps]
    header = ("platform", "per step", "90 % interval", "", "per second", "memory", f"$ per {result.unit}", "trust")
    kept = [at for at in range(len(header)) if any(row[at] for row in rows)]
    table = format_table([header[at] for at in kept], [[row[at] for at in kept] for row in rows], right=())
    lines = [result.headline(), "", table, "", "bars: time of a sample, the light part is its 90 % interval"]
    lines += _list_run_lines(result)
    lines += [f"prices: {result.priced}"] if result.priced else []
    return "\n".join([*lines, *(f"failed: {name}: {why}" for name, why in result.failed.items())])


def _list_cells(result: PlatformComparison, step: PlatformStep) -> tuple[str, ...]:
    p = step.prediction
    rate = f"{format_count(p.throughput.tokens)} tokens" if p.throughput.tokens else format_count(p.throughput.samples)
    room = p.platform.device.memory_bytes / 1e9
    held = f"{format_gigabytes(p.needed_bytes)} of {room:.3g} GB{_mark_fit(p)}"
    dollars = "" if step.dollars is None else format_dollars(step.dollars)
    name = step.platform if p.gpus == 1 else f"{step.platform} x {p.gpus}"
    return (
        name, format_duration(p.iteration), format_interval(p.interval), _draw_bar(result, step), rate, held, dollars,
        p.trust.word,
    )  # fmt: skip


def _scale_limits(result: PlatformComparison, step: PlatformStep) -> tuple[float, float, float]:
    """Low, middle and high of the time of a sample, as shares of the highest of all."""
    widest = max(s.prediction.interval[1] / s.cost.samples for s in result.steps)
    low, high = step.prediction.interval
    return tuple(seconds / step.cost.samples / widest for seconds in (low, step.prediction.iteration, high))  # type: ignore[return-value]


def _draw_bar(result: PlatformComparison, step: PlatformStep) -> str:
    low, middle, high = (round(_WIDTH * share) for share in _scale_limits(result, step))
    return "█" * low + "▓" * (middle - low) + "░" * (high - middle)


def _list_run_lines(result: PlatformComparison) -> list[str]:
    """What a whole run takes, where its length was given."""
    lines = []
    for step in result.steps:
        cost = step.cost.to_dict()
        if cost["run_hours"] is not None:
            parts = [format_duration(3600 * cost["run_hours"])]
            parts += [] if cost["run_dollars"] is None else [format_dollars(cost["run_dollars"])]
            parts += [] if cost["run_most_kwh"] is None else [f"at most {format_energy(cost['run_most_kwh'])}"]
            lines.append(f"the run on {step.platform}: {', '.join(parts)}")
    return lines


def draw_platforms(result: PlatformComparison) -> str:
    """The same as a drawing (SVG) that stands for itself: a bar per platform as long as a sample takes, whiskers from
    low to high, figures at the right."""
    height = _TOP + _ROW * len(result.steps) + 24
    width = _LEFT + _BAR + _RIGHT
    title = escape(f"{result.name}: time of a sample, with its 90 % interval")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{title}"><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="26" font-size="16" font-weight="600" fill="#16191d">{title}</text>',
    ]
    for number, step in enumerate(result.steps):
        low, middle, high = (_LEFT + _BAR * share for share in _scale_limits(result, step))
        y = _TOP + _ROW * number
        per_sample = format_duration(step.seconds_per_sample)
        dollars = "" if step.dollars is None else f", {format_dollars(step.dollars)} per {result.unit}"
        fits = "" if step.prediction.fits else ", does not fit"
        colour = "#4477aa" if step.prediction.fits else "#a3a9b3"
        lines += [
            f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end" fill="#16191d">{escape(step.platform)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{middle - _LEFT:.1f}" height="20" fill="{colour}"/>',
            f'<path d="M{low:.1f} {y + 10}H{high:.1f}M{low:.1f} {y + 5}v10M{high:.1f} {y + 5}v10" stroke="#16191d" '
            'stroke-width="1.5" fill="none"/>',
            f'<text x="{_LEFT + _BAR + 10}" y="{y + 15}" fill="#545c66">{escape(per_sample + dollars + fits)}</text>',
        ]
    note = escape(f"prices: {result.priced}") if result.priced else ""
    lines.append(f'<text x="12" y="{height - 8}" font-size="11" fill="#545c66">{note}</text>')
    return "\n".join([*lines, "</svg>", ""])


def format_scaling(curve: ScalingCurve) -> str:
    """The curve as a table."""
    header = (
        "GPUs",
        "nodes",
        "batch",
        "per GPU",
        "ms per step",
        "90 % interval",
        "samples/s",
        "exposed comm",
        "GB per GPU",
        "efficiency",
        "",
    )
    rows = [
        (
            str(p.gpus),
            str(p.nodes),
            str(p.global_batch),
            str(p.answer.workload.batch_size),
            format_milliseconds(p.answer.iteration),
            " to ".join(format_milliseconds(limit) for limit in p.answer.interval),
            _format_rate(p.throughput),
            f"{format_milliseconds(p.answer.exposed_comm)} ms",
            f"{p.answer.needed_bytes / 1e9:.1f}{_mark_fit(p.answer)}",
            f"{p.efficiency:.1%}",
            format_bar(p.efficiency, 20),
        )
        for p in curve.points
    ]
    last = curve.points[-1]
    verdict, trust, *_ = state_verdict(last.answer)
    kept = f"Efficiency {last.efficiency:.1%} of {count_of(curve.points[0].gpus, 'GPU')}"
    lines = [curve.title(), f"{count_of(last.gpus, 'GPU')}: {verdict}", f"{kept}. {trust}"]
    lines += ["", format_table(header, rows, right=range(10))]
    return "\n".join([*lines, *format_remarks(curve.warnings)])


def _format_rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.2f}"


_SHOWN = 5


def format_remedies(remedies: Sequence[Remedy]) -> str:
    """Changes under which a step that does not fit would, the cheapest first."""
    if not remedies:
        return "none of the changes that were tried makes it fit; give more GPUs or a smaller model"
    rows = [
        (one.text, f"{one.prediction.needed_bytes / 1e9:.1f}",
         f"{one.prediction.fit_probability:.0%}", format_milliseconds(one.prediction.iteration),
         format_duration(one.seconds_per_sample))
        for one in remedies
    ]  # fmt: skip
    header = ("would fit with, cheapest first", "GB needed", "surely", "ms per step", "GPU time per sample")
    return format_table(header, rows, right=(1, 2, 3, 4))


def format_fit(fit: Fit) -> str:
    """The verdict, what fills the peak, and what would make the step fit."""
    memory, p = fit.memory, fit.prediction
    low, high = (f"{bound / 1e9:,.1f}" for bound in memory.used_interval)
    lines = [
        f"{fit.headline()}.{_state_help(fit)}",
        f"A step takes {format_duration(p.iteration)} (90 % interval {format_interval(p.interval)}). "
        f"{p.trust.sentence}",
        f"{p.workload.name}, batch {p.workload.batch_size}, {count_of(p.gpus, 'GPU')}: "
        f"{memory.allocated_bytes / 1e9:,.2f} GB allocated, {memory.reserved_bytes / 1e9:,.2f} reserved, "
        f"{memory.used_bytes / 1e9:,.2f} used (90 % interval {low} to {high}){_state_difference(fit)}",
        "",
    ]
    rows = [
        (one["category"].replace("_", " "), one["module"] or "-", one["line"] or "-", f"{one['count']:,}",
         f"{one['gb']:,.2f}") for one in fit.list_culprits(_SHOWN)
    ]  # fmt: skip
    lines.append(format_table(("largest at the peak", "module", "line", "blocks", "GB"), rows, right=(3, 4)))
    if not fit.fits:
        lines += ["", format_remedies(fit.remedies)]
    if fit.largest is not None:
        found = fit.largest
        shown = f"{found.text} ({found.probability:.0%} sure)" if found.value else "none, not even 1"
        lines += ["", f"largest {found.axis} that fits: {shown}"]
    return "\n".join(lines)


def _state_difference(fit: Fit) -> str:
    """Why the verdict has another number than what is used, where it has."""
    p, memory = fit.prediction, fit.memory
    if p.left_out_bytes:
        return f"; {p.left_out_bytes / 1e9:,.1f} GB more with all rows of its tables"
    if fit.fits and memory.used_bytes > memory.limit_bytes:
        return f"; {memory.required_bytes / 1e9:,.1f} are enough, the allocator gives back what it caches"
    hosted = f"; {memory.host_bytes / 1e9:,.1f} GB of host memory"
    return hosted if memory.host_bytes > 1e9 else ""


def _state_help(fit: Fit) -> str:
    """What would help most, where it does not fit."""
    return f" It would with {fit.remedies[0].text}." if fit.remedies else ""
