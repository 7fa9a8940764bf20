"""Options of the commands that change a step: edits and money."""

from __future__ import annotations

import argparse
from typing import Any

from traincast.app.cli.arguments import parse_count
from traincast.utils.errors import TraincastError


def add_money_arguments(parser: argparse.ArgumentParser) -> None:
    """What a step costs."""
    parser.add_argument("--price", type=float, metavar="X", help="dollars of one GPU for an hour")
    parser.add_argument("--samples", type=parse_count, metavar="N", help="samples of the whole run, such as 4B")
    parser.add_argument("--tokens", type=parse_count, metavar="N", help="tokens of the whole run, such as 15T")
    parser.add_argument("--power-watts", type=float, dest="power_limit_w", help=argparse.SUPPRESS)  # its old name


def add_edit_arguments(parser: argparse.ArgumentParser) -> None:
    """Which edits are made."""
    parser.add_argument("--set", action="append", default=[], metavar="EDIT=VALUE", dest="settings",
                        help="an edit with a value: batch-size=4096; may be given several times")  # fmt: skip
    parser.add_argument("--apply", action="append", default=[], metavar="EDIT",
                        help="an edit without one: cuda-graph; may be given several times")  # fmt: skip


def read_edits(args: argparse.Namespace) -> list[str]:
    """The edits that were given, each as one text."""
    for text in args.settings:
        if "=" not in text:
            raise TraincastError(f"--set {text}: write EDIT=VALUE, or --apply {text} for an edit without a value")
    return [*args.settings, *args.apply]


def read_money_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords that say what a step costs."""
    names = ("price", "samples", "tokens")
    return {name: getattr(args, name) for name in names}
