#!/usr/bin/env python
"""Draws docs/images/rivals.svg, the chart of README: our mean error beside others', on the same rows.

The figures are those of README's table, so the chart cannot say anything else; a test compares the file.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "rivals.svg"
WIDTH, LEFT, SCALE, ROW, TOP = 860, 330, 10.5, 24, 48
"""Pixels: of the picture, left of the bars, of a percent, of a row, above the first row."""
OURS, THEIRS = "#0b5cad", "#a3a9b3"


def read_rows() -> list[tuple[str, list[tuple[str, float]]]]:
    """What was predicted, and whose MAPE is what, ours first: on the rows that the others published for."""
    found = []
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 6 or not cells[1].isdecimal() or not cells[5]:
            continue
        what, mape, others = re.sub(r" \(.*\)", "", cells[0]), float(cells[3]), cells[5]
        same = re.search(r"\(ours ([\d.]+)\)", others)
        named = re.findall(r"([A-Za-z][A-Za-z ]*?) ([\d.]+)(?: on (?:three|ten))?", re.sub(r"\(.*?\)", "", others))
        if first := re.match(r"([\d.]+) \((.*?)\)", others):
            named = [(first[2], first[1]), *named]
        rows = [("Traincast", float(same[1]) if same else mape), *((name.strip(), float(n)) for name, n in named)]
        if subset := re.search(r" on (three|ten)", others):
            what += f", the {subset[1]} that both have"
        found.append((what, rows))
    return found


def draw_chart() -> str:
    """The SVG."""
    groups = read_rows()
    height = TOP + sum(ROW * (len(rows) + 1) + 8 for _, rows in groups)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Mean absolute error, percent, ours and others">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        '<text x="16" y="26" font-size="16" font-weight="bold">Mean absolute error of predicted step times, percent '
        "(MAPE)</text>",
    ]
    y = TOP
    for what, rows in groups:
        lines.append(f'<text x="16" y="{y + 16}" font-weight="bold">{what}</text>')
        for name, value in rows:
            y += ROW
            colour = OURS if name == "Traincast" else THEIRS
            lines += [
                f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{name}</text>',
                f'<rect x="{LEFT}" y="{y + 3}" width="{value * SCALE:.1f}" height="16" fill="{colour}"/>',
                f'<text x="{LEFT + value * SCALE + 6:.1f}" y="{y + 16}">{value:g}</text>',
            ]
        y += ROW + 8
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw_chart(), encoding="utf-8")
