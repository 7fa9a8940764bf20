"""A sweep as a picture (SVG): time of a sample over its cost, the points that nothing beats joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from traincast.planner.what_if.sweeps.result import SweepResult, get_row_cost

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 820, 520, 80, 60, 40, 190
_COLOURS = ("#1b6ca8", "#c8553d", "#2e8b57", "#8e5ea2", "#b8860b", "#008b8b", "#a0522d", "#555555")
_MOST_POINTS = 20_000


def draw_picture(result: SweepResult) -> str:
    """The picture. Both scales are logarithmic; points are coloured by their first axis that has several values."""
    rows = [row for row in result.rows if not row.get("error")][:_MOST_POINTS]
    paid = any(row["dollars_per_million_samples"] is not None for row in rows)
    labels = ("$ a million samples" if paid else "GPU hours per million samples", "us per sample")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(result.name, quote=True)}: time over cost">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(result.name)}: {len(result.rows):,} points</text>',
    ]
    if rows:
        parts += _draw_chart(result, rows, labels)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_chart(result: SweepResult, rows: Sequence[dict[str, Any]], labels: tuple[str, str]) -> list[str]:
    across, up = _make_scale([get_row_cost(row) for row in rows]), _make_scale([row["us_per_sample"] for row in rows])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(row: dict[str, Any]) -> tuple[float, float]:
        x = _LEFT + (right - _LEFT) * _to_share(get_row_cost(row), across)
        return x, bottom - (bottom - _TOP) * _to_share(row["us_per_sample"], up)

    colour_axis = next((name for name, values in result.grid.axes if len(values) > 1), result.grid.names[0])
    values = list(dict.fromkeys(row[colour_axis] for row in rows))
    colours = {value: _COLOURS[i % len(_COLOURS)] for i, value in enumerate(values)}
    parts = _draw_frame(across, up, labels)
    for row in rows:
        x, y = place(row)
        hollow = "" if row["fits"] else ' fill-opacity="0.15"'
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[row[colour_axis]]}"{hollow}/>')
    best = [place(row) for row in sorted(result.pareto, key=get_row_cost)]
    if best:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in best)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#222" stroke-dasharray="4 3"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="#222"/>' for x, y in best]
    return [*parts, *_draw_legend(colour_axis, colours)]


def _draw_frame(across: tuple[float, float], up: tuple[float, float], labels: tuple[str, str]) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#444"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">{labels[0]}</text>',
        f'<text transform="translate(18 {(bottom + _TOP) / 2}) rotate(-90)" text-anchor="middle">{labels[1]}</text>',
    ]
    for tick in range(5):
        share = tick / 4
        x, y = _LEFT + (right - _LEFT) * share, bottom - (bottom - _TOP) * share
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{_from_share(share, across):.3g}</text>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{_from_share(share, up):.3g}</text>')
    return parts


def _draw_legend(axis: str, colours: dict[str, str]) -> list[str]:
    x = _WIDTH - _RIGHT + 20
    parts = [f'<text x="{x}" y="{_TOP + 8}">{escape(axis)}</text>']
    for number, (value, colour) in enumerate(list(colours.items())[:16]):
        y = _TOP + 30 + 20 * number
        parts.append(f'<circle cx="{x + 5}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{escape(str(value)[:24])}</text>')
    return [*parts, f'<text x="{x}" y="{_HEIGHT - 40}">ringed: not beaten</text>',
            f'<text x="{x}" y="{_HEIGHT - 24}">pale: does not fit</text>']  # fmt: skip


def _make_scale(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.05 * (high - low) or 0.1
    return low - room, high + room


def _to_share(value: float, scale: tuple[float, float]) -> float:
    return (math.log(value) - scale[0]) / (scale[1] - scale[0])


def _from_share(share: float, scale: tuple[float, float]) -> float:
    return math.exp(scale[0] + share * (scale[1] - scale[0]))
