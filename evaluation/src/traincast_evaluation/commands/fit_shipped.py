"""What `traincast fit` does besides fitting a machine's own profile: it rebuilds the shipped profiles (kernel models,
collectives, host overheads) from a folder of measurements."""

from __future__ import annotations

import argparse

from traincast.app.cli.arguments import parse_path
from traincast.app.cli.output import print_result, show_progress_bar
from traincast_evaluation.api import fit
from traincast_evaluation.fitting.profile_fits import PIECES
from traincast_evaluation.fitting.shipped import FitResult

DESCRIPTION = """
Without '--store' it rebuilds the shipped profiles (kernel models, collectives, host overheads) from a folder of
measurements. The same data give the same bytes: a profile keeps the date of the shipped one while nothing else
differs, and gets today's (UTC, or SOURCE_DATE_EPOCH) when something does. Nothing is written unless every piece asked
for could be fitted: bad data is named by file, row (from 0) and column. The profiles go to the folder '--out'. Without
it, a source checkout gets them in its own 'src/traincast'; an installed package is written to only with
'--into-package'.
"""
"""What the help of the command says of this."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for the shipped profiles."""
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{', '.join(PIECES)} (default: all)")
    parser.add_argument(
        "--data", type=parse_path, metavar="DIR", help="folder of measurements (default: $TRAINCAST_DATA)"
    )
    parser.add_argument("--into-package", action="store_true", help="replace the profiles of the installed package")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether any of these arguments is given."""
    return bool(args.pieces or args.data or args.into_package)


def run(args: argparse.Namespace) -> int:
    """Fits and writes."""
    with show_progress_bar("fit") as progress:
        result = fit(*args.pieces, data=args.data, out=args.out, into_package=args.into_package, progress=progress)
    print_result(result, FitResult.headline, as_json=args.json)
    return 0
