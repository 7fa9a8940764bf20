"""The commands of the command line, their parsers and their exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from importlib import import_module
from typing import Any, NoReturn

from traincast.app.cli.help import format_command_help, format_overview
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.plugins import COMMANDS, AddedCommand, find_plugins, load_plugin, missing_evaluation
from traincast.utils.version import __version__

VERBS = {
    "predict": "how long one step of a model takes on a platform, and why",
    "fits": "whether a step fits in memory, what fills it, and what would make it fit",
    "compare": "one step on several GPUs side by side: time, memory, dollars, energy",
    "plan": "how to train a Transformer on a given number of GPUs: the layout with the fastest step",
    "shard": "where embedding tables go: the plan with the fastest step",
    "whatif": "what a change of the model or the hardware would bring, and whether that is certain",
    "sweep": "many points of a step: batch sizes, platforms, GPUs, edits, into a table and a picture",
    "capture": "a training step of your own model, without a GPU",
    "trace": "what measured traces say: steps, idle time and its reasons, host overheads, replay",
    "check": "a gate for CI: predictions against a stored baseline, without a GPU",
    "export": "a workload as PyTorch or Chakra execution trace",
    "bench": "microbenchmarks of this machine, into a store",
    "fit": "the profile of a machine, from what bench measured on it",
    "measure": "a real training step, timed on this machine",
    "report": "one HTML file to show: the result, why, timeline, memory, provenance",
    "serve": "the same results as live pages and a REST API, on this machine",
    "mcp": "the same results as tools for coding agents, over stdin and stdout",
    "models": "the built-in models",
    "platforms": "the built-in GPUs and nodes",
    "completion": "a script that lets your shell complete commands, options and names",
}
"""What each command is for; it lives in `commands/<verb>.py`, which is imported only when the command is asked for."""

ADDED = ("evaluate",)
"""Commands that traincast-evaluation adds."""

OK, CHECK_FAILED, BAD_INPUT = 0, 1, 2
"""Exit codes."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose complaints are errors like all others: one line instead of usage and error."""

    def error(self, message: str) -> NoReturn:
        """Rejects the arguments and says where they are explained."""
        command = self.prog.removeprefix("traincast").strip()
        raise TraincastError(f"{f'{command}: ' if command else ''}{message} (see '{self.prog} --help')")

    def format_help(self) -> str:
        """Short help: what is most used, on one screen."""
        command = self.prog.removeprefix("traincast").strip()
        if not command:
            return format_overview({name: known.summary for name, known in list_commands().items()})
        return format_command_help(self, command, whole=False)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Rejects `--option=--`, of which argparse would make an empty list."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


class _WholeHelp(argparse.Action):
    """Prints the help of a command with every option explained, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        parser._print_message(format_command_help(parser, parser.prog.split()[-1], whole=True), sys.stdout)
        parser.exit()


def reject_unknown(extra: list[str], command: str, parser: Parser) -> NoReturn:
    """Rejects arguments that a command does not know, with the option that was meant."""
    given = next((word for word in extra if word.startswith("--")), extra[0]).partition("=")[0]
    if not given.startswith("-"):
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    known = sorted(list_options(parser).values())
    plain = given.lower().replace("_", "").replace("-", "")
    same = [name for name in known if name.replace("-", "") == plain] or [n for n in known if n.startswith(given)]
    if same:
        raise TraincastError(f"{command}: unknown option '{given}'. Did you mean {', '.join(same[:3])}?")
    raise make_unknown_error("option", given, known, f"See '{parser.prog} --help'.")


def build_parsers(wanted: Collection[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and those of the commands wanted; the others are known by name only."""
    parser = Parser(
        prog="traincast",
        description="How long will one training step of this model take on that hardware, and why?",
    )
    parser.add_argument("--version", action="version", version=f"traincast {__version__}")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    made = {}
    for verb, command in list_commands(wanted).items():
        if verb not in wanted:
            commands.add_parser(verb, help=command.summary, add_help=False)
            continue
        module = import_module(command.module)
        made[verb] = commands.add_parser(verb, help=command.summary, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(made[verb])
        made[verb].add_argument("--json", action="store_true", help="one JSON document on stdout")
        made[verb].add_argument("--help-all", action=_WholeHelp, nargs=0, help="explains every option")
        made[verb].set_defaults(run=module.run, options=list_options(made[verb]))
    return parser, made


def list_commands(wanted: Collection[str] = ()) -> dict[str, AddedCommand]:
    """Every command by name, those of other distributions last; they are looked up unless all `wanted` are built in."""
    known = {
        command: AddedCommand(summary, f"traincast.app.cli.commands.{command}") for command, summary in VERBS.items()
    }
    if wanted and all(command in known for command in wanted):
        return known
    known |= {command: load_plugin(COMMANDS, command) for command in find_plugins(COMMANDS) if command not in known}
    absent = [command for command in wanted if command in ADDED and command not in known]
    if absent:
        raise missing_evaluation(f"traincast {absent[0]}")
    return known


def list_options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """How the command line writes the parameters of a command: `batch_size` is `--batch-size`."""
    return {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
