#!/usr/bin/env python
"""Writes docs/reference/command-line.md: every verb with its options, from the command line itself."""

from __future__ import annotations

import argparse
import re
import textwrap
from importlib import import_module
from pathlib import Path

from traincast.app.cli.verbs import known_verbs
from traincast.utils.plugins import AddedCommand

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command-line.md"
WIDTH = 118
"""Characters of a line of prose."""
INTRODUCTION = """# Command line

Written by `python scripts/write_command_line.py`. Every verb also has `--help` and `--json` (one JSON document on
stdout instead of text), and a [call in Python](index.md) with the same words. `evaluate`, and all of `fit` but
`--store`, come with the second distribution, traincast-evaluation.

| exit code | meaning |
|---|---|
| 0 | all is well |
| 1 | the answer is no: no plan fits, or an error is above `--max-mape` |
| 2 | the input is wrong; one line on stderr says what, and what to do |
| 70 | a defect of Traincast; one line on stderr says what to report |
| 130 | interrupted |
"""


def verb_section(verb: str, command: AddedCommand) -> str:
    """What a verb does, how it is called, and its options as a table."""
    module = import_module(command.module)
    parser = argparse.ArgumentParser(prog=f"traincast {verb}", add_help=False, description=module.__doc__)
    module.add_arguments(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    needed = [action for action in shown if action.required or not action.option_strings]
    usage = " ".join(["traincast", verb, *(_call(action) for action in sorted(needed, key=_is_option))])
    if len(usage) > WIDTH:  # the table has the choices
        usage = " ".join(["traincast", verb, *(action.dest.upper() for action in needed)])
    lines = [f"## {verb}", "", f"`{usage}`", "", _prose(parser.description or "")]
    if shown:
        lines += ["", "| | meaning |", "|---|---|", *(_row(action) for action in shown)]
    return "\n".join([*lines, ""])


def _is_option(action: argparse.Action) -> bool:
    return bool(action.option_strings)


def _call(action: argparse.Action) -> str:
    """An argument as it is written: its first name and what stands for its value."""
    return " ".join(part for part in (*action.option_strings[:1], _placeholder(action)) if part)


def _placeholder(action: argparse.Action) -> str:
    """What stands for the value of an argument ("" for a flag)."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(str(choice) for choice in action.choices) + "}"
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"{name} ..." if action.nargs in ("+", "*") else name


def _row(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    call = " ".join(part for part in (names, _placeholder(action)) if part)
    meaning = (action.help or "").replace("%%", "%")
    return f"| `{call}` | {meaning} |".replace("|  |", "| |")


def _prose(text: str) -> str:
    """A docstring as Markdown: paragraphs filled, examples as blocks, quoted commands as code."""
    parts = []
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        if paragraph.startswith(("  ", "traincast ")):
            parts.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        else:
            marked = re.sub(r"(?<!\w)'([^']+)'(?!\w)", r"`\1`", paragraph)
            parts.append(textwrap.fill(marked, WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(parts)


def page_text() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, *(verb_section(verb, command) for verb, command in known_verbs().items())])


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
