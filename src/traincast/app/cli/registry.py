"""The commands of the command line, their parsers and exit codes, and help that fits on a screen."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, NoReturn

from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.plugins import COMMANDS, AddedCommand, find_plugins, load_plugin, missing_evaluation
from traincast.utils.version import __version__

TASKS = {
    "Predict and decide": ("predict", "fits", "compare", "plan", "shard", "whatif", "sweep"),
    "Your own model and machine": ("capture", "trace", "check", "measure", "bench", "fit", "export"),
    "Show and share": ("report", "serve", "mcp"),
    "Look up": ("models", "platforms", "completion"),
}
"""Commands by what people want; any other is listed last."""
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "predict": (
        "predict resnet50 --on v100 --batch-size 64",
        "predict llama3-8b --on dgx-h100 --gpus 8 --fsdp --checkpoint full",
        "predict train.py:make_step --on a100-80gb        (captures it first)",
    ),
    "fits": ("fits llama3-8b --on dgx-h100 --gpus 8",),
    "compare": ("compare resnet50 --on v100,a100-80gb,h100 --batch-size 128",),
    "plan": ("plan llama3-70b --on dgx-h100 --gpus 256 --global-batch 512",),
    "shard": ("shard mlperf-dlrm-v2 --on dgx-a100 --gpus 8 --batch-size 8192",),
    "whatif": ("whatif dlrm-v2 --on h100 --set dtype=bf16", "whatif bert-large --on a100-80gb --advise"),
    "sweep": ("sweep resnet50 --vary on=v100,h100 --vary batch-size=32:256:x2",),
    "capture": ("capture train.py:make_step -o step.tc", "capture train.py -o step.tc --batch-size 64 -- --epochs 1"),
    "trace": ("trace trace.json.gz", "trace folder-of-ranks --on h100", "trace before.json after.json --compare"),
    "check": ("check --baseline perf.json step.yaml --update --reason 'first'", "check --baseline perf.json"),
    "measure": ("measure dlrm-default --batch-size 512",),
    "bench": ("bench --budget 5m",),
    "fit": ("fit --store STORE",),
    "export": ("export resnet50 -o step.json",),
    "report": ("report dlrm-default --on v100 --batch-size 2048 -o step.html", "report trace.json.gz -o trace.html"),
    "serve": ("serve",),
    "mcp": ("mcp",),
    "models": ("models", "models llama"),
    "platforms": ("platforms", "platforms h100"),
    "completion": ("completion bash",),
    "evaluate": ("evaluate dlrm --data DIR",),
}
"""What to type; the first of each stands in the overview."""
_WIDEST = 100
_COLUMN = 26  # where the explanations of options begin
_USUAL = frozenset((
    "gpus", "batch_size", "seq_len", "micro_batch", "global_batch", "dtype", "optimizer", "compiled", "checkpoint",
    "tp", "pp", "fsdp", "zero",
))  # fmt: skip
"""Fields of a scenario that a short help explains; of the others it has the names."""


def format_overview(summaries: Mapping[str, str]) -> str:
    """What `traincast` alone and `traincast --help` print: commands by task, an example each."""
    lines = ["How long will one training step of this model take on that hardware, and why?", ""]
    known = [command for commands in TASKS.values() for command in commands]
    others = {"More": tuple(command for command in summaries if command not in known)}
    for task, commands in {**TASKS, **others}.items():
        there = [command for command in commands if command in summaries]
        lines += [task] if there else []
        for command in there:
            example = EXAMPLES.get(command, (command,))[0].split("   ")[0]
            lines += [f"  {command:<11}{_shorten(summaries[command], 13)}", f"  {'':<11}$ traincast {example}"]
    return "\n".join([*lines, "", "'traincast COMMAND --help' has its options; --json gives one document.", ""])


def _shorten(text: str, used: int) -> str:
    return textwrap.shorten(text, get_width() - used, placeholder=" ...")


def get_width() -> int:
    """Columns of the terminal, at most as many as are easy to read."""
    return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)


def format_command_help(parser: argparse.ArgumentParser, command: str, *, whole: bool) -> str:
    """Usage, what it does, examples, options. Short: the first paragraph, the usual options explained, the others named
    by group; `whole`: everything."""
    width = get_width()
    paragraphs = textwrap.dedent(parser.description or "").strip().split("\n\n")
    words = [_write_call(action) for action in parser._actions if action.required or not action.option_strings]
    lines = [textwrap.fill(f"traincast {' '.join([command, *words])} [options]", width, subsequent_indent="    "), ""]
    for paragraph in paragraphs if whole else paragraphs[:1]:
        lines += [paragraph if paragraph.startswith("  ") else textwrap.fill(paragraph, width), ""]
    if command in EXAMPLES:
        lines += ["Examples", *(f"  traincast {example}" for example in EXAMPLES[command]), ""]
    named: list[str] = []
    for group in parser._action_groups:
        shown = [
            action
            for action in group._group_actions
            if action.help != argparse.SUPPRESS and action.dest not in ("help", "help_all")
        ]
        short = [] if whole else [action for action in shown if _is_unusual(action, group)]
        explained = [action for action in shown if action not in short]
        heading = [str(group.title).capitalize()] if explained and group.title != "positional arguments" else []
        lines += [*heading, *(_explain(action, width) for action in explained)]
        if short:
            names = " ".join(action.option_strings[-1] for action in short)
            named += textwrap.wrap(
                f"{group.title}: {names}", width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    if named:
        lines += [f"More ('traincast {command} --help-all' explains them)", *named]
    return "\n".join(lines) + "\n"


def _is_unusual(action: argparse.Action, group: argparse._ArgumentGroup) -> bool:
    from traincast.simulator.scenario.scenario import GROUPS  # which the overview does not need

    return group.title in GROUPS.values() and action.dest not in _USUAL


def _write_call(action: argparse.Action) -> str:
    """An argument as it is written: `WORKLOAD`, `--on PLATFORM`, `--dtype fp32|bf16`."""
    name = action.option_strings[-1] if action.option_strings else ""
    if action.nargs == 0:
        return name
    choices = "|".join(map(str, action.choices)) if action.choices is not None else ""
    value = action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()
    several = " ..." if action.nargs in ("+", "*") else ""
    return f"{name} {value}{several}".strip()


def _explain(action: argparse.Action, width: int) -> str:
    """One argument and its help, in a column of its own where the call is short."""
    call = ", ".join([*action.option_strings[:-1], _write_call(action)])
    help = (action.help or "").replace("%%", "%")
    first = f"  {call:<{_COLUMN - 4}}  " if len(call) <= _COLUMN - 4 else f"  {call}\n{'':<{_COLUMN}}"
    filled = textwrap.fill(help, max(width - _COLUMN, 30), break_on_hyphens=False)
    return (first + filled.replace("\n", "\n" + " " * _COLUMN)).rstrip()


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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Rejects a value that is none of the choices, with the one that was meant."""
        if action.choices is not None and value not in action.choices and action.option_strings:
            choices = [str(choice) for choice in action.choices]
            kind = f"value of {action.option_strings[-1]}"
            remedy = f"Choose from {', '.join(choices)} (see '{self.prog} --help')."
            raise make_unknown_error(kind, str(value), choices, remedy)
        super()._check_value(action, value)

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


def reject_unknown(extra: list[str], parser: Parser, given: Mapping[str, Any]) -> NoReturn:
    """Rejects arguments that a command does not know, with the option that was meant; `given` are the others."""
    option = next((word for word in extra if word.startswith("-")), "").partition("=")[0]
    known = sorted(list_options(parser).values())
    if not option:
        meant = "--set" if "=" in extra[0] else "--on"
        fits = meant in known and not given.get(meant[2:])
        hint = f". Did you mean {meant} {extra[0]}?" if fits else ""
        parser.error(f"unrecognized arguments: {' '.join(extra)}{hint}")
    raise make_unknown_error("option", option, known, f"See '{parser.prog} --help'.")


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
