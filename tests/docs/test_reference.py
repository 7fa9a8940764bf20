"""The reference follows the code: every command and option, every call of the API."""

from __future__ import annotations

import re
import runpy

import traincast
import traincast_evaluation
from tests.docs.pages import DOCS, ROOT
from traincast.app.cli.registry import list_commands
from traincast.simulator.scenario.scenario import list_scenario_fields


def test_command_line_page_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "write_command_line.py"))

    page = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert page == script["page_text"](), "run python scripts/write_command_line.py"
    assert re.findall(r"(?m)^## (.*)$", page) == list(list_commands())


def test_prediction_page_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "write_prediction.py"))

    page = (DOCS / "reference" / "prediction.md").read_text(encoding="utf-8")
    assert page == script["page_text"](), "run python scripts/write_prediction.py"


def test_api_page_has_every_call():
    page = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"(?m)^::: traincast\.(\w+)$", page))

    assert {name for name in traincast.__all__ if name != "__version__"} <= shown
    assert set(traincast_evaluation.__all__) == set(re.findall(r"(?m)^::: traincast_evaluation\.(\w+)$", page))


def test_every_option_stands_on_the_command_line_page():
    script = runpy.run_path(str(ROOT / "scripts" / "write_command_line.py"))
    page = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"(?ms)^## (\S+)\n(.*?)(?=^## |\Z)", page))

    missing = {
        (command, name)
        for command in list_commands()
        for action in script["command_actions"](command)
        for name in action.option_strings[-1:]
        if name not in sections[command]
        and not (action.dest in list_scenario_fields() and script["ALL_FIELDS"] in sections[command])
    }
    assert missing == set()


OTHERS = {
    "--help",
    "--json",
    "--version",
    "--no-deps",
    "--strict",
    "--width",
    "--log",
    "--logs",
    "--cases",
    "--breakdown",
}
"""Options of every command, and those of other programs and of our scripts that pages name."""


def test_pages_name_only_commands_and_options_that_exist():
    script = runpy.run_path(str(ROOT / "scripts" / "write_command_line.py"))
    options = {
        name
        for command in list_commands()
        for action in script["command_actions"](command)
        for name in action.option_strings
    }
    unknown = set()
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - options - OTHERS
        named |= set(re.findall(r"(?m)(?:`|^\$ |^)traincast ([a-z]+)\b", text)) - set(list_commands())
        unknown |= {(page.name, name) for name in named}

    assert unknown == {("add-a-command.md", "describe")}, "the page adds a command"
