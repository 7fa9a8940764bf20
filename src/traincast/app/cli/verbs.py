"""The verbs of the command line, their parsers and their exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from importlib import import_module
from typing import Any, NoReturn

from traincast.utils.errors import TraincastError
from traincast.utils.plugins import COMMANDS, AddedCommand, find_plugins, load_plugin, missing_evaluation
from traincast.utils.version import __version__

VERBS = {
    "predict": "how long one step of a model takes on a platform, and why",
    "plan": "how to train a Transformer on so many GPUs: the layout with the fastest step",
    "shard": "where embedding tables go: the plan with the fastest step",
    "whatif": "what a change of the model or the hardware would bring, and whether that is certain",
    "sweep": "many points of a step: batch sizes, platforms, GPUs, edits, into a table and a picture",
    "report": "one HTML file to show: the answer, why, timeline, memory, provenance",
    "serve": "the same answers as live pages and a REST API, on this machine",
    "models": "the built-in models",
    "platforms": "the built-in GPUs and nodes",
    "capture": "a training step of your own model, without a GPU",
    "export": "a workload as PyTorch or Chakra execution trace",
    "fit": "the profile of a machine, from what bench measured on it",
    "trace": "what measured traces say: steps, idle time and its reasons, host overheads, replay",
    "bench": "microbenchmarks of this machine, into a store",
    "measure": "a real training step, timed on this machine",
    "completion": "a script that lets your shell complete verbs, options and names",
}
"""What each verb is for; it lives in `commands/<verb>.py`, which is imported only when the verb is asked for."""

ADDED = ("evaluate",)
"""Verbs that traincast-evaluation adds."""

OK, CHECK_FAILED, BAD_INPUT = 0, 1, 2
"""Exit codes."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose complaints are errors like all others: one line instead of usage and error."""

    def error(self, message: str) -> NoReturn:
        """Refuses the arguments and says where they are explained."""
        verb = self.prog.removeprefix("traincast").strip()
        raise TraincastError(f"{f'{verb}: ' if verb else ''}{message} (see '{self.prog} --help')")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuses `--option=--`, of which argparse would make an empty list."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


def parsers(wanted: Collection[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and those of the verbs wanted; the others are known by name only."""
    parser = Parser(
        prog="traincast",
        description="How long will one training step of this model take on that hardware, and why?",
    )
    parser.add_argument("--version", action="version", version=f"traincast {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    made = {}
    for verb, command in known_verbs(wanted).items():
        if verb not in wanted:
            verbs.add_parser(verb, help=command.summary, add_help=False)
            continue
        module = import_module(command.module)
        made[verb] = verbs.add_parser(
            verb,
            help=command.summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(made[verb])
        made[verb].add_argument("--json", action="store_true", help="one JSON document on stdout")
        made[verb].set_defaults(run=module.run, options=options(made[verb]))
    return parser, made


def known_verbs(wanted: Collection[str] = ()) -> dict[str, AddedCommand]:
    """Every verb by name, those of other distributions last; they are looked up unless all `wanted` are built in."""
    known = {verb: AddedCommand(summary, f"traincast.app.cli.commands.{verb}") for verb, summary in VERBS.items()}
    if wanted and all(verb in known for verb in wanted):
        return known
    known |= {verb: load_plugin(COMMANDS, verb) for verb in find_plugins(COMMANDS) if verb not in known}
    absent = [verb for verb in wanted if verb in ADDED and verb not in known]
    if absent:
        raise missing_evaluation(f"traincast {absent[0]}")
    return known


def options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """How the command line writes the parameters of a verb: `batch_size` is `--batch-size`."""
    return {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
