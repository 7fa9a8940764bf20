"""The built-in GPUs and nodes, with the figures predictions use, and which kernels were measured on them.

TEXT shows only those with it in their name: 'traincast platforms h100'.

Your own GPU is a TOML file of the same form (docs/how-it-works/hardware.md): 'traincast predict ... --on my-gpu.toml'.
"""

from __future__ import annotations

import argparse

from traincast.app.api import list_platforms
from traincast.app.cli.output import print_result
from traincast.app.report.catalog import format_platforms
from traincast.utils.errors import TraincastError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("text", metavar="TEXT", nargs="?", help="only platforms with this in their name or GPU")


def run(args: argparse.Namespace) -> int:
    """Lists the platforms."""
    platforms = list_platforms()
    chosen = platforms.select(args.text) if args.text else platforms
    if not chosen:
        raise TraincastError(f"no platform has '{args.text}' in its name; 'traincast platforms' lists all")
    print_result(chosen, format_platforms, as_json=args.json)
    return 0
