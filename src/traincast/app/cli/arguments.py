"""Arguments that several commands read the same way: paths, numbers, edits, money."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from traincast.utils.errors import TraincastError

_MOST_DIGITS = 9


def parse_path(text: str) -> Path:
    """The path that an argument names. An empty one is rejected, which Python would take for the current folder."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("a name that no file can have; give a path") from None
    if not text.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is no path; give one")
    return Path(text)


def parse_whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of `1,2,4`; `option` is named when it is something else.

    >>> parse_whole_numbers("--ranks", "1,2,4")
    [1, 2, 4]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS for part in parts):
        raise TraincastError(f"{option} {text}: give an integer, or several with commas between: 1,2,4,8")
    return [int(part) for part in parts]


def parse_count(text: str) -> float:
    """A number of samples or tokens: `4e9`, `4B`, `15T`, `300M`.

    >>> parse_count("15T")
    15000000000000.0
    """
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    number = float(text[:-1] if scale != 1.0 else text)  # what is no number is rejected by argparse
    return number * scale


def _parse_processes(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of processes; give 1 or more")
    return int(text)


def add_processes_option(parser: argparse.ArgumentParser) -> None:
    """Where many independent tasks run."""
    parser.add_argument(
        "--processes", type=_parse_processes, metavar="N", dest="processes", help="default: one per core"
    )


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
