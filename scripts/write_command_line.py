#!/usr/bin/env python
"""Writes docs/reference/command-line.md: every command with its options, from the command line itself.

Options that are fields of a scenario stand on the page of the scenario; commands say which of them they take.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from functools import cache
from importlib import import_module
from pathlib import Path

from traincast.app.cli.registry import list_commands
from traincast.simulator.scenario.scenario import list_scenario_fields

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command-line.md"
WIDTH = 118
"""Characters of a line of prose."""
SCENARIO = "[scenario](prediction.md#scenario)"
ALL_FIELDS = f"And all fields of a {SCENARIO}"
"""What a command with every field says."""
INTRODUCTION = """# Command line

Written by `python scripts/write_command_line.py`. Every command also has `--help` and `--json` (one JSON document on
stdout instead of text), and a [call in Python](index.md) with the same words. Fields of a
[scenario](prediction.md#scenario) are explained there: `--batch-size` is `batch_size`. `evaluate` and the pieces of
`fit` come with the second distribution, `traincast-evaluation`.

| exit code | meaning |
|---|---|
| 0 | all is well |
| 1 | the result is no: no plan fits, or an error is above `--max-mape` |
| 2 | the input is wrong; one line on stderr says what, and what to do |
| 70 | a defect of Traincast; one line on stderr says what to report |
| 130 | interrupted |
"""


@cache
def command_parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command, with its help as description."""
    module = import_module(list_commands()[command].module)
    parser = argparse.ArgumentParser(prog=f"traincast {command}", add_help=False, description=module.__doc__)
    module.add_arguments(parser)
    return parser


def command_actions(command: str) -> list[argparse.Action]:
    """The arguments of a command that its help shows."""
    return [action for action in command_parser(command)._actions if action.help != argparse.SUPPRESS]


@cache
def scenario_rows() -> tuple[str, ...]:
    """Rows of the options of `predict` that are fields of a scenario."""
    return tuple(_row(action) for action in command_actions("predict") if action.dest in list_scenario_fields())


def command_section(command: str) -> str:
    """What a command does, how it is called, and its options as a table; fields of a scenario by name only."""
    shown = command_actions(command)
    needed = [action for action in shown if action.required or not action.option_strings]
    usage = " ".join(["traincast", command, *(_call(action) for action in sorted(needed, key=_is_option))])
    if len(usage) > WIDTH:  # the table has the choices
        usage = " ".join(["traincast", command, *(action.dest.upper() for action in needed)])
    lines = [f"## {command}", "", f"`{usage}`", "", _prose(command_parser(command).description or "")]
    fields = [action for action in shown if _is_option(action) and _row(action) in scenario_rows()]
    own = [action for action in shown if action not in fields and _row(action) not in scenario_rows()]
    if own:
        lines += ["", "| | meaning |", "|---|---|", *(_row(action) for action in own)]
    if fields:
        lines += ["", *textwrap.wrap(_fields_text(fields, own), WIDTH, break_long_words=False, break_on_hyphens=False)]
    return "\n".join([*lines, ""])


def _fields_text(fields: list[argparse.Action], own: list[argparse.Action]) -> str:
    """Which fields of a scenario a command takes: those it does not take where they are fewer."""
    every = [_option(action) for action in command_actions("predict") if action.dest in list_scenario_fields()]
    taken = {_option(action) for action in (*fields, *own)}
    missing = [f"`{name}`" for name in every if name not in taken and name.startswith("-")]  # the workload is no option
    if 2 * len(missing) < len(taken):
        return f"{ALL_FIELDS}{' but ' + ', '.join(missing) if missing else ''}."
    return f"Of a {SCENARIO}: {', '.join(f'`{_option(action)}`' for action in fields)}."


def _option(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else action.dest


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
    return "\n".join([INTRODUCTION, *(command_section(command) for command in list_commands())])


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
