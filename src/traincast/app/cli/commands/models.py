"""Everything that has a name: recommenders, Transformers, vision models, published programs, sets of embedding tables.

TEXT shows only those with it in their name, group or description: 'traincast models llama'. '--coverage' shows for
every op of every captured model how it is lowered to kernels, and which ops fall back to an estimate from their bytes.
"""

from __future__ import annotations

import argparse

from traincast.app.api import list_models
from traincast.app.cli.output import print_result
from traincast.app.report.catalog import format_coverage, format_models
from traincast.utils.errors import TraincastError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("text", metavar="TEXT", nargs="?", help="only what has this in its name or description")
    parser.add_argument("--coverage", action="store_true", help="how every op is lowered")


def run(args: argparse.Namespace) -> int:
    """Lists the models or their coverage."""
    models = list_models()
    chosen = models.select(args.text) if args.text else models
    if not chosen:
        raise TraincastError(f"no model has '{args.text}' in its name or description; 'traincast models' lists all")
    if args.coverage:
        print_result(chosen.coverage(), format_coverage, as_json=args.json)
    else:
        print_result(chosen, format_models, as_json=args.json)
    return 0
