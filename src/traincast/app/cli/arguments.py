"""Arguments that several verbs read the same way."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_MOST_DIGITS = 9


def file_path(text: str) -> Path:
    """The path that an argument names. An empty one is refused, which Python would take for the current folder."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("a name that no file can have; give a path") from None
    if not text.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is no path; give one")
    return Path(text)


def _processes(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of processes; give 1 or more")
    return int(text)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Where many independent tasks run."""
    parser.add_argument("--processes", type=_processes, metavar="N", dest="processes", help="default: one per core")
    parser.add_argument("--ray", metavar="ADDRESS", help="runs on this Ray cluster (local, auto, ray://host:10001)")
