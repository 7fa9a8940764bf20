"""The same results as tools for coding agents: a server of the Model Context Protocol over stdin and stdout.

Tools: predict, compare, plan, shard, whatif, trace, models, platforms; each takes the fields of a scenario and returns
the verdict first, then the figures. Files are read where the agent runs. Needs the extra 'mcp'. In the settings of an
agent the command is 'traincast mcp'.
"""

from __future__ import annotations

import argparse

from traincast.app.cli.registry import OK
from traincast.app.tools import make_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(_: argparse.Namespace) -> int:
    """Serves until its input ends."""
    make_server().run()
    return OK
