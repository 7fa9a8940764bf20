"""A comparison of platforms for the terminal and as a drawing: bars with their intervals, dollars, memory, trust."""

from __future__ import annotations

from html import escape

from traincast.planner.what_if.platforms import PlatformComparison, PlatformStep
from traincast.utils.display.text import (
    format_count,
    format_dollars,
    format_duration,
    format_energy,
    format_interval,
    format_table,
)

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
    held = f"{p.needed_bytes / 1e9:.3g} of {room:.3g} GB{'' if p.fits else ', too large'}"
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
