"""Rebuilds the shipped profiles (kernel models, collectives, host overheads) from a folder of measurements.

The same data give the same bytes: a profile keeps the date of the shipped one while nothing else differs, and gets
today's (UTC, or SOURCE_DATE_EPOCH) when something does. Nothing is written unless every piece asked for could be
fitted: bad data is named by file, row (from 0) and column. The profiles go to the folder '--out'. Without it, a source
checkout gets them in its own 'src/traincast'; an installed package is written to only with '--into-package'.

'--store DIR' fits the profile of a machine from what 'traincast bench' measured on it, and says how wrong it is on
the fifth that is held out. It goes to the file '--out', or where '--on here' finds it. With '--refine GPU' the store
is of a GPU that is built in: its shipped model is corrected, not replaced, and the file '--out' is a platform.
"""

from __future__ import annotations

import argparse

from traincast.app.api import fit, fit_store, refine
from traincast.app.cli.arguments import file_path
from traincast.app.cli.output import print_result
from traincast.app.cli.progress import progress_bar
from traincast.calibration.fit_shipped import FitResult
from traincast.calibration.fitting.pieces import PIECES
from traincast.calibration.here import Calibrated
from traincast.calibration.refine import Refined
from traincast.utils.errors import TraincastError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{', '.join(PIECES)} (default: all)")
    parser.add_argument(
        "--data", type=file_path, metavar="DIR", help="folder of measurements (default: $TRAINCAST_DATA)"
    )
    parser.add_argument("--store", type=file_path, metavar="DIR", help="a store of 'traincast bench' to fit instead")
    parser.add_argument("--refine", metavar="GPU", help="correct the shipped model of this GPU by the store")
    parser.add_argument("--clock", choices=("wall", "busy"), help="of the store's samples (default wall)")
    parser.add_argument("--out", type=file_path, metavar="PATH", help="where to write (default: the source checkout)")
    parser.add_argument("--into-package", action="store_true", help="replace the profiles of the installed package")


def run(args: argparse.Namespace) -> int:
    """Fits and writes."""
    if args.store is not None:
        if args.pieces or args.data or args.into_package:
            raise TraincastError("--store fits a machine's own profile; leave out pieces, --data and --into-package")
        if args.refine is not None:
            print_result(refine(args.store, args.refine, out=args.out), Refined.headline, as_json=args.json)
            return 0
        calibrated = fit_store(args.store, out=args.out, clock=args.clock or "wall")
        print_result(calibrated, Calibrated.headline, as_json=args.json)
        return 0
    if args.clock or args.refine:
        raise TraincastError("--clock and --refine are about a --store; give one")
    with progress_bar("fit") as progress:
        result = fit(*args.pieces, data=args.data, out=args.out, into_package=args.into_package, progress=progress)
    print_result(result, FitResult.headline, as_json=args.json)
    return 0
