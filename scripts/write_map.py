#!/usr/bin/env python
"""Prints the table of docs/rooms.toml into docs/architecture.md, between its two markers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
START = "<!-- rooms: written by scripts/write_map.py from docs/rooms.toml -->"
END = "<!-- rooms end -->"
LEAVES = ("errors", "arrays", "quantiles", "version")
"""Modules that every room may need; not repeated in the printed table."""


def declared_rooms() -> dict[str, dict[str, Any]]:
    """The rows of docs/rooms.toml by name, left to right; `imports` and `libraries` are lists in every row."""
    rows = tomllib.loads((ROOT / "docs" / "rooms.toml").read_text(encoding="utf-8"))
    return {name: {"imports": [], "libraries": [], **row} for name, row in rows.items()}


def map_lines() -> list[str]:
    """The Markdown table."""
    lines = ["| room | what lives there | may import |", "|---|---|---|"]
    for name, row in declared_rooms().items():
        rooms = [room for room in row["imports"] if room not in LEAVES]
        libraries = [f"`{library}`" for library in row["libraries"]]
        lines.append(f"| `{name}` | {row['what']} | {', '.join(rooms + libraries) or 'nothing'} |")
    return lines


def page_with_map(page: str) -> str:
    """The page's text with the table of today between its markers."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return "\n".join([before + START, *map_lines(), END + after])


if __name__ == "__main__":
    PAGE.write_text(page_with_map(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
