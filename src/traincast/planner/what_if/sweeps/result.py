"""What a sweep answers: rows, those that failed, those that nothing beats; and its picture (SVG)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from traincast.planner.what_if.sweeps.points import Grid, Prepared, Sweep, predict_point
from traincast.simulator.prediction.result import Prediction
from traincast.utils.results import Records, Result


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SweepResult(Result):
    """A row for every point, in the order of the grid: its values by axis, then figures or an `error`. `predict` gives
    the whole prediction of a point; a document of few points has them all."""

    name: str
    sweep: Sweep
    grid: Grid
    rows: list[dict[str, Any]]
    resumed: int = 0
    workers: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Points that could not be predicted, with why."""
        return [row for row in self.rows if row.get("error")]

    @property
    def pareto(self) -> list[dict[str, Any]]:
        """Points that fit in memory and that no other beats in time, cost and memory at once; the fastest first."""
        return find_pareto_rows([row for row in self.rows if not row.get("error") and row["fits"]])

    def predict(self, number: int) -> Prediction:
        """The prediction that a row (from 0) has the figures of."""
        return predict_point(Prepared(sweep=self.sweep), tuple(self.grid)[number])

    def _add_documents(self) -> list[dict[str, Any]]:
        """The rows, of few points each with its prediction as one document."""
        if len(self.rows) > _MOST_DOCUMENTS:
            return self.rows if len(self.rows) <= _MOST_ROWS else []
        return [
            {**row, "prediction": None if row.get("error") else self.predict(number).to_dict()}
            for number, row in enumerate(self.rows)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; rows of at most 64 points have their `prediction`."""
        return {
            "workload": self.name,
            "axes": {name: list(values) for name, values in self.grid.axes},
            "points": len(self.rows),
            "failed": len(self.failed),
            "resumed": self.resumed,
            "workers": self.workers,
            "seconds": self.seconds,
            "pareto": self.pareto,
            "failures": self.failed[:_MOST_FAILURES],
            "rows": self._add_documents(),
            "notes": list(self.notes),
        }

    def headline(self) -> str:
        """How many points, how long, and how many failed."""
        again = f", {self.resumed:,} of them from before" if self.resumed else ""
        failed = f"; {len(self.failed):,} could not be predicted" if self.failed else ""
        ran = f"in {self.seconds:.1f} s ({self.workers}{again}){failed}"
        return (
            f"{self.name}: {_count_points(len(self.rows))} {ran}\n"
            f"{_count_points(len(self.pareto))} that no other beats in time of a sample, cost and memory at once"
        )

    def records(self) -> Records:
        """Tables "points" and "pareto"."""
        return {"points": self.rows, "pareto": self.pareto}


def _count_points(number: int) -> str:
    return f"{number:,} point{'s' * (number != 1)}"


_MOST_FAILURES = 100
_MOST_DOCUMENTS = 64
_MOST_ROWS = 10_000  # in a document; the file has them all


def get_row_cost(row: dict[str, Any]) -> float:
    """Dollars of a million samples, or GPU hours where there is no price."""
    dollars = row["dollars_per_million_samples"]
    return float(row["gpu_hours_per_million_samples"] if dollars is None else dollars)


def find_pareto_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that no other beats: none is at least as good in all goals and better in one."""
    ranked = sorted(rows, key=lambda row: (row["us_per_sample"], get_row_cost(row), row["memory_gb"]))
    kept: list[tuple[float, float, dict[str, Any]]] = []
    for row in ranked:
        # who comes earlier is at least as fast, so it beats this one if it is also no dearer and no larger
        price, held = get_row_cost(row), row["memory_gb"]
        if not any(other <= price and size <= held for other, size, _ in kept):
            kept.append((price, held, row))
    return [row for _, _, row in kept]


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
