#!/usr/bin/env python
"""Prints the table of docs/packages.toml into docs/architecture.md, between its two markers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
START = "<!-- packages: written by scripts/write_map.py from docs/packages.toml -->"
END = "<!-- packages end -->"
LEAVES = ("utils",)
"""What every package may import; not repeated in the printed table."""


def declared_packages() -> dict[str, dict[str, Any]]:
    """The rows of docs/packages.toml by name, left to right; `imports` and `libraries` are lists in every row."""
    rows = tomllib.loads((ROOT / "docs" / "packages.toml").read_text(encoding="utf-8"))
    return {name: {"imports": [], "libraries": [], **row} for name, row in rows.items()}


def map_lines() -> list[str]:
    """The Markdown table."""
    lines = ["| package | what lives there | may import |", "|---|---|---|"]
    for name, row in declared_packages().items():
        packages = [package for package in row["imports"] if package not in LEAVES]
        libraries = [f"`{library}`" for library in row["libraries"]]
        lines.append(f"| `{name}` | {row['what']} | {', '.join(packages + libraries) or 'nothing'} |")
    return lines


def page_with_map(page: str) -> str:
    """The page's text with the table of today between its markers."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return "\n".join([before + START, *map_lines(), END + after])


if __name__ == "__main__":
    PAGE.write_text(page_with_map(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
