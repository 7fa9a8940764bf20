"""Puts what today's code prints into the tutorials: `python scripts/write_tutorials.py [PAGE.md ...]`.

Commands and sessions run in an empty folder, as the test runs them. Output that differs takes the place of what is
shown; what a page leaves out ("...") stays left out. Read the difference before you keep it.
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.docs.pages import DOCS, blocks_of, commands_of, matches, shell_environment  # noqa: E402


def shortened(shown: str, printed: str) -> str:
    """What was printed, with the lines that a page leaves out left out, and the words that it has as "..."."""
    lines, before = [line.rstrip() for line in printed.strip("\n").split("\n")], shown.split("\n")
    if before.count("...") == 1:
        place = before.index("...")
        after = len(before) - place - 1
        lines = [*lines[:place], "...", *(lines[len(lines) - after :] if after else [])]
    vague = [line for line in before if "..." in line and line != "..."]
    return "\n".join(next((new for old in vague if (new := _vague(old, line))), line) for line in lines)


def _vague(old: str, line: str) -> str:
    """The new line with "..." where the old one has it, if they differ in numbers only; else nothing."""
    parts = [re.sub(r"(\\[.,]|\d)+", r"[\\d.,]+", re.escape(part.rstrip())) for part in old.split("...")]
    found = re.fullmatch(".*?".join(f"({part}\\s*)" for part in parts), line)
    return "...".join(found.groups()).rstrip() if found else ""


class _Collecting(doctest.DocTestRunner):
    """Keeps what examples gave where it was not what the page shows."""

    def __init__(self) -> None:
        super().__init__(optionflags=doctest.ELLIPSIS, verbose=False)
        self.changed: list[tuple[str, str]] = []

    def report_failure(self, out: Any, test: Any, example: doctest.Example, got: str) -> None:
        new = shortened(example.want.rstrip("\n"), got) + "\n"
        self.changed.append((example.source + example.want, example.source + new))


def session(text: str, body: str, folder: Path) -> str:
    """The page with the results of one Python session as they are today."""
    runner = _Collecting()
    parsed = doctest.DocTestParser().get_doctest(body, {}, "page", "page", 0)
    before = Path.cwd()
    os.chdir(folder)
    try:
        runner.run(parsed, out=lambda _: None)
    finally:
        os.chdir(before)
    for old, new in runner.changed:
        shown = ">>> " + "... ".join(old.splitlines(keepends=True)[:1]) + "".join(old.splitlines(keepends=True)[1:])
        if shown in text:
            text = text.replace(shown, ">>> " + new, 1)
        else:
            print(f"by hand: {old!r} -> {new!r}")
    return text


def rewritten(page: Path, folder: Path) -> str:
    """The text of a page with what its commands print today."""
    text = page.read_text(encoding="utf-8")
    environment = shell_environment(folder)
    for example in page.parent.glob("example-*"):
        shutil.copy(example, folder)
    for block in blocks_of(text):
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "pycon":
            text = session(text, block.body, folder)
        elif block.language == "console":
            for command in commands_of(block.body):
                done = subprocess.run(
                    command.line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    print(f"{page.name}: {command.line}\n{done.stderr}", file=sys.stderr)
                elif command.shown and not matches(command.shown, done.stdout):
                    text = text.replace(command.shown, shortened(command.shown, done.stdout), 1)
    return text


def main() -> int:
    pages = [Path(name) for name in sys.argv[1:]] or sorted((DOCS / "tutorial").glob("*.md"))
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            new = rewritten(page, Path(folder))
        if new != page.read_text(encoding="utf-8"):
            page.write_text(new, encoding="utf-8")
            print(f"changed {page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
