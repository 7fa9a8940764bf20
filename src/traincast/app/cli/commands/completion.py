"""A script that lets your shell complete commands, options, and the names of models and platforms.

traincast completion bash > ~/.local/share/bash-completion/completions/traincast
traincast completion fish > ~/.config/fish/completions/traincast.fish
traincast completion zsh > ~/.traincast.zsh        # and in ~/.zshrc: source ~/.traincast.zsh
"""

from __future__ import annotations

import argparse

from traincast.app.api import list_models, list_platforms
from traincast.app.cli.completion import SHELLS, describe_command, write_script
from traincast.app.cli.output import print_json, print_text
from traincast.app.cli.registry import build_parsers, list_commands
from traincast.simulator.scenario.models import LANGUAGE, TABLES


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
