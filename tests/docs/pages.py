"""What a documentation page shows: its fenced blocks, the files and commands in them, and how to run them.

The pages follow one grammar, so that a reader can copy everything and a test can run it:

- a block with a title (```python title="my_model.py") is a file;
- a ```console block holds commands after "$ " and, below each, what it prints; nothing below means
  "whatever it prints";
- a ```pycon block is a Python session with its answers.

In shown output "..." stands for any text, and a line of only "..." for any number of lines.
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(?P<language>[\w-]*)(?P<rest>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    title: str
    body: str


class Command(NamedTuple):
    """A command of a console block and the output shown below it ("" where none is)."""

    line: str
    shown: str


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    blocks = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["rest"])
        blocks.append(Block(match["language"], title[1] if title else "", match["body"]))
    return blocks


def commands_of(body: str) -> list[Command]:
    """The commands of a console block."""
    commands = []
    for part in re.split(r"(?m)^\$ ", body)[1:]:
        line, _, shown = part.partition("\n")
        while line.endswith("\\"):
            more, _, shown = shown.partition("\n")
            line = line[:-1] + more.strip()
        commands.append(Command(line, shown.strip("\n")))
    return commands


def matches(shown: str, printed: str) -> bool:
    """Whether printed text is what a page shows, but for blanks at the ends of lines and what "..." stands for."""
    pattern = []
    for line in shown.strip("\n").split("\n"):
        if line.strip() == "...":
            pattern.append(r"(?:[^\n]*\n)*?")
        else:
            pattern.append(r"[^\n]*?".join(re.escape(part) for part in line.rstrip().split("...")) + r"[ ]*\n")
    return re.fullmatch("".join(pattern), printed.strip("\n") + "\n") is not None


def shell_environment(folder: Path) -> dict[str, str]:
    """An environment in which `traincast` and `python` are those of this test, one thread each."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, arguments in (("traincast", "-m traincast"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }


def run_page(page: Path, folder: Path) -> int:
    """Carries out a page in a folder; gives how many commands and sessions ran. Raises where something differs."""
    environment = shell_environment(folder)
    for example in page.parent.glob("example-*"):
        shutil.copy(example, folder)
    ran = 0
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "console":
            for command in commands_of(block.body):
                run_command(command, folder, environment)
                ran += 1
        elif block.language == "pycon":
            run_session(block.body, page.name, folder)
            ran += 1
    return ran


def run_command(command: Command, folder: Path, environment: dict[str, str]) -> None:
    """Runs one command; it must succeed and print what is shown."""
    done = subprocess.run(
        command.line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command.line}\n{done.stdout}{done.stderr}"
    if command.shown:
        assert matches(command.shown, done.stdout), f"{command.line} prints\n{done.stdout}"


def run_session(body: str, name: str, folder: Path) -> None:
    """Runs a Python session in a folder."""
    before = Path.cwd()
    session = doctest.DocTestParser().get_doctest(body, {}, name, name, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    said: list[str] = []
    os.chdir(folder)
    try:
        runner.run(session, out=said.append)
    finally:
        os.chdir(before)
    assert runner.failures == 0, "".join(said)
