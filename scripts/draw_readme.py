#!/usr/bin/env python
"""Draws docs/images/step.svg, the picture of README: the timeline of one predicted step.

It draws what `traincast predict ... --trace-out` writes, so the picture shows real output. A test compares the
file with what this draws.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "step.svg"
QUESTION = ("predict", "dlrm-default", "--on", "v100", "--batch-size", "2048")
WIDTH, LEFT, RIGHT, TOP = 960, 112, 16, 56
"""Pixels: of the picture, left of the time axis, right of it, above the first row."""
ROW, GAP = 34, 14
"""Pixels: height of a row, and between two rows."""
COLOURS = {
    "gemm": "#3b6fb6", "embedding": "#d9822b", "memcpy": "#8a5fb3", "elementwise": "#3f9e6e", "reduction": "#c2504d",
    "index": "#c9a227", "copy": "#5aa6b8", "host": "#9aa3ad",
}  # fmt: skip
"""One per kernel family, dark enough for white and light enough for dark pages; the host is grey."""

Event = dict[str, Any]


def predicted_events() -> list[Event]:
    """The timeline of the predicted step as Chrome trace events; times in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [sys.executable, "-m", "traincast", *QUESTION, "--trace-out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events: list[Event] = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    return events


def picture(events: list[Event]) -> str:
    """The SVG: launches of the host, kernels of the device, the critical path, a legend and a time axis."""
    kernels = [event for event in events if event["ph"] == "X" and event["cat"] in COLOURS]
    path = [event for event in events if event["ph"] == "X" and event["cat"] == "critical"]
    launches = [event for event in events if event["ph"] == "s"]
    end_us = max(event["ts"] + event["dur"] for event in path)
    scale = (WIDTH - LEFT - RIGHT) / end_us
    rows = [
        ("host launches", [_bar(event["ts"], 5.0, scale, 0, COLOURS["host"]) for event in launches]),
        ("device kernels", [_bar(event["ts"], event["dur"], scale, 1, COLOURS[event["cat"]]) for event in kernels]),
        ("critical path", [_bar(event["ts"], event["dur"], scale, 2, _path_colour(event)) for event in path]),
    ]
    lines = [*_frame(end_us, scale), *_legend()]
    for number, (label, bars) in enumerate(rows):
        middle = TOP + number * (ROW + GAP) + ROW / 2 + 4
        lines += [f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{label}</text>', *bars]
    return "\n".join([*lines, "</svg>", ""])


def _path_colour(event: Event) -> str:
    """The colour of what a piece of the critical path is: a kernel family, else the host."""
    return COLOURS.get(event["name"].split(":")[0], COLOURS["host"])


def _bar(start_us: float, length_us: float, scale: float, row: int, colour: str) -> str:
    top = TOP + row * (ROW + GAP)
    left, width = LEFT + start_us * scale, max(length_us * scale, 0.4)
    return f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{colour}"/>'


def _frame(end_us: float, scale: float) -> list[str]:
    """Background, title and time axis with a tick for every millisecond."""
    height = TOP + 3 * (ROW + GAP) + 36
    bottom = height - 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="13" shape-rendering="crispEdges"'
        ' role="img" aria-label="Timeline of one predicted training step">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">traincast {" ".join(QUESTION)}: {end_us / 1e3:.2f} ms</text>',
        f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="#555555"/>',
    ]
    for tick in range(int(end_us / 1e3) + 1):
        x = LEFT + tick * 1e3 * scale
        lines.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="#555555"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{tick} ms</text>')
    return lines


def _legend() -> list[str]:
    lines = []
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + number * 105
        lines.append(f'<rect x="{x}" y="31" width="11" height="11" fill="{colour}"/>')
        lines.append(f'<text x="{x + 16}" y="41">{name}</text>')
    return lines


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(predicted_events()), encoding="utf-8")
