"""Code blocks of the pages under docs/extend, so that tests carry out what a page tells a reader to do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The page's fenced blocks of a language, top to bottom."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def write_files(page: str, language: str, folder: Path) -> None:
    """Writes every block whose first line is a comment with a file's name (`# rubin.toml`) under that name."""
    for block in blocks(page, language):
        first = re.match(r"# (\S+\.\w+)\n", block)
        if first:
            (folder / first[1]).write_text(block, encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """The arguments of every `traincast` command in the page's shell blocks."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("traincast ")]
