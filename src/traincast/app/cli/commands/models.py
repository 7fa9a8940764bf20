"""The built-in models: parameters, ops and kernels of one training step.

'--coverage' shows for every op of every built-in how it is lowered to kernels, and which ops fall back to an
estimate from their bytes.
"""

from __future__ import annotations

import argparse

from traincast.app.api import list_models
from traincast.app.cli.output import print_result
from traincast.app.report.catalog import format_coverage, format_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--coverage", action="store_true", help="how every op is lowered")


def run(args: argparse.Namespace) -> int:
    """Lists the models or their coverage."""
    if args.coverage:
        print_result(list_models().coverage(), format_coverage, as_json=args.json)
    else:
        print_result(list_models(), format_models, as_json=args.json)
    return 0
