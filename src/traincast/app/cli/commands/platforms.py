"""The built-in GPUs and nodes, with the figures predictions use.

Your own GPU is a TOML file of the same form (docs/how-it-works/hardware.md): 'traincast predict ... --on my-gpu.toml'.
"""

from __future__ import annotations

import argparse

from traincast.app.api import list_platforms
from traincast.app.cli.output import print_result
from traincast.app.report.catalog import format_platforms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """Lists the platforms."""
    print_result(list_platforms(), format_platforms, as_json=args.json)
    return 0
