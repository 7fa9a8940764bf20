"""A script that lets your shell complete commands, options, and the names of models and platforms.

traincast completion bash > ~/.local/share/bash-completion/completions/traincast
traincast completion fish > ~/.config/fish/completions/traincast.fish
traincast completion zsh > ~/.traincast.zsh        # and in ~/.zshrc: source ~/.traincast.zsh"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from traincast.app.api import list_models, list_platforms
from traincast.app.cli.output import print_json, print_text
from traincast.app.cli.registry import build_parsers, list_commands
from traincast.simulator.scenario.catalog import LANGUAGE, TABLES

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_traincast() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {verbs} -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{values}
        *)
            case "${{COMP_WORDS[1]}}" in
{options}
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _traincast traincast
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how it is written, what it is for, whether a value follows, and which values are known."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it is for, its options, and the words known for its other arguments."""

    name: str
    summary: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def describe_command(
    name: str, summary: str, parser: argparse.ArgumentParser, known: Mapping[str, Sequence[str]]
) -> Command:
    """A command from its parser; `known` has the words for arguments without choices, by what the help calls them."""
    options: list[Option] = []
    words: list[str] = []
    for action in parser._actions:
        values = tuple(map(str, action.choices or known.get(str(action.metavar), ())))
        if action.option_strings:
            names, takes_value = tuple(action.option_strings), action.nargs != 0
            options.append(Option(names, action.help or "", takes_value, values))
        else:
            words += values
    return Command(name, summary, tuple(options), tuple(words))


def write_script(shell: str, commands: Sequence[Command]) -> str:
    """The script for one of `SHELLS`. zsh runs that of bash."""
    if shell == "fish":
        return _write_fish(commands)
    return (_ZSH if shell == "zsh" else "") + _write_bash(commands)


def _write_bash(commands: Sequence[Command]) -> str:
    """After an option its values (none known: files), else the options and words of the command."""
    values = [
        f"        {'|'.join(shlex.quote(f'{command.name} {name}') for name in option.names)})\n"
        f"            words={shlex.quote(' '.join(option.values))} ;;"
        for command in commands
        for option in command.options
        if option.takes_value
    ]
    options = [
        f"                {command.name}) "
        f"words={shlex.quote(' '.join([*_list_option_names(command), *command.words]))} ;;"
        for command in commands
    ]
    known = shlex.quote(" ".join(command.name for command in commands))
    return _BASH.format(verbs=known, values="\n".join(values), options="\n".join(options))


def _list_option_names(command: Command) -> list[str]:
    return [name for option in command.options for name in option.names]


def _write_fish(commands: Sequence[Command]) -> str:
    lines = []
    for command in commands:
        when = f"-n '__fish_seen_subcommand_from {command.name}'"
        lines.append(
            f"complete -c traincast -n __fish_use_subcommand -f -a {command.name} -d {_quote_for_fish(command.summary)}"
        )
        if command.words:
            lines.append(f"complete -c traincast {when} -a {_quote_for_fish(' '.join(command.words))}")
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = (
                f" -x -a {_quote_for_fish(' '.join(option.values))}" if option.values else " -r" * option.takes_value
            )
            lines.append(f"complete -c traincast {when} {names}{value} -d {_quote_for_fish(option.help)}")
    return "\n".join(lines) + "\n"


def _quote_for_fish(text: str) -> str:
    """Text between single quotes, in which fish knows two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    models = list_models()
    known = {
        "WORKLOAD": [model.info.name for model in models],
        "MODEL": [model.info.name for model in models if model.group == LANGUAGE],
        "TABLES": [model.info.name for model in models if model.group == TABLES],
        "PLATFORM": [platform.key for platform in list_platforms()],
    }
    commands = list_commands()
    _, made = build_parsers(commands)
    text = write_script(
        args.shell,
        [describe_command(command, commands[command].summary, parser, known) for command, parser in made.items()],
    )
    if args.json:
        print_json({"shell": args.shell, "script": text})
    else:
        print_text(text)
    return 0
