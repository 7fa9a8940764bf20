"""HTML for notebooks: tables and lines of text. Data in, HTML out; everything that comes in is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def format_html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A table; columns in `right` are right-aligned."""
    aligned = [' style="text-align:right"' if column in right else "" for column in range(len(header))]

    def line(row: Sequence[str], tag: str) -> str:
        cells = (f"<{tag}{align}>{escape(cell)}</{tag}>" for cell, align in zip(row, aligned, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


def format_html_lines(text: str) -> str:
    """A paragraph with the line breaks of the text."""
    return f"<p>{'<br>'.join(escape(line) for line in text.splitlines())}</p>"


def format_html_details(title: str, content: str) -> str:
    """HTML under a title that opens and closes; it begins closed."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def format_html_bars(header: Sequence[str], rows: Sequence[tuple[str, float]], *, unit: str) -> str:
    """Names with bars as long as their figures, which stand alongside them."""
    largest = max((value for _, value in rows), default=0.0) or 1.0
    lines = "".join(
        f'<tr><td style="text-align:left">{escape(name)}</td>'
        f'<td style="text-align:right">{value:.4g} {escape(unit)}</td>'
        f'<td><svg width="180" height="12" aria-hidden="true"><rect width="{180 * max(value, 0.0) / largest:.1f}" '
        f'height="12" fill="#4477aa"/></svg></td></tr>'
        for name, value in rows
    )
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in (*header, ""))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def format_html_curve(points: Sequence[tuple[str, float, float, float]], *, label: str) -> str:
    """A curve with a band: (what stands below, value, low, high) at equal distances; `label` says what it shows."""
    width, height, left, below = 460, 220, 56, 34
    top = max(high for *_, high in points) * 1.08 or 1.0
    places = [left + (width - left - 20) * at / max(len(points) - 1, 1) for at in range(len(points))]

    def y(value: float) -> float:
        return (height - below) * (1 - value / top) + 6

    line = " ".join(f"{x:.1f},{y(value):.1f}" for x, (_, value, _, _) in zip(places, points, strict=True))
    lows = [f"{x:.1f},{y(low):.1f}" for x, (_, _, low, _) in zip(places, points, strict=True)]
    highs = [f"{x:.1f},{y(high):.1f}" for x, (_, _, _, high) in zip(places, points, strict=True)]
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="3.5" fill="#4477aa"/><text x="{x:.1f}" y="{height - 12}" '
        f'text-anchor="middle" font-size="12" fill="currentColor">{escape(name)}</text>'
        for x, (name, value, _, _) in zip(places, points, strict=True)
    )
    scale = "".join(
        f'<text x="{left - 8}" y="{y(top * share) + 4:.1f}" text-anchor="end" font-size="12" fill="currentColor">'
        f"{top * share:.3g}</text>"
        for share in (0.0, 0.5, 1.0)
    )
    return (
        f'<figure><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}"><polygon points="{" ".join(lows + highs[::-1])}" fill="#4477aa" '
        f'fill-opacity="0.2"/><polyline points="{line}" fill="none" stroke="#4477aa" stroke-width="2"/>{marks}{scale}'
        f"</svg><figcaption>{escape(label)}</figcaption></figure>"
    )
