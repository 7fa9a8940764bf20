"""Fits the profile of a machine from what 'traincast bench' measured on it, and says how wrong it is on the fifth that
is held out. '--store DIR' has the measurements. The profile goes to the file '--out', or where '--on here' finds it.
With '--refine GPU' the store is of a GPU that is built in: its shipped model is corrected, not replaced, and the file
'--out' is a platform. With '--from-trace' instead of a store, traces of your own runs correct it and its host; every
other step is fitted to, and the steps between say how wrong it is.
"""

from __future__ import annotations

import argparse
import os

from traincast.app.api import fit_store, refine, refine_from_traces
from traincast.app.cli.arguments import parse_path
from traincast.app.cli.output import print_result
from traincast.calibration.here import Calibrated
from traincast.calibration.refine import Refined
from traincast.utils.errors import TraincastError
from traincast.utils.plugins import FIT, load_plugin, missing_evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command, and those that rebuild the shipped profiles where that is installed."""
    shipped = load_plugin(FIT, "shipped")
    if shipped is not None:
        shipped.add_arguments(parser)
        parser.description = f"{parser.description or ''}{shipped.DESCRIPTION}"
    parser.add_argument("--store", type=parse_path, metavar="DIR", help="a store of 'traincast bench' to fit")
    parser.add_argument("--refine", metavar="GPU", help="correct the shipped model of this GPU by the store or traces")
    parser.add_argument(
        "--from-trace", type=parse_path, nargs="+", metavar="FILE", help="traces of your own runs on that GPU"
    )
    parser.add_argument("--clock", choices=("wall", "busy"), help="of the store's samples (default wall)")
    parser.add_argument("--out", type=parse_path, metavar="PATH", help="where to write")


def run(args: argparse.Namespace) -> int:
    """Fits and writes."""
    shipped = load_plugin(FIT, "shipped")
    if args.store is not None:
        if args.from_trace:
            raise TraincastError("--store and --from-trace are two sources of one fit; give one")
        if shipped is not None and shipped.is_asked(args):
            raise TraincastError("--store fits a machine's own profile; leave out pieces, --data and --into-package")
        return _fit_store(args)
    if args.from_trace:
        return _fit_traces(args)
    if args.clock or args.refine:
        raise TraincastError("--clock and --refine are about a --store; give one")
    if shipped is not None and not shipped.is_asked(args) and "TRAINCAST_DATA" not in os.environ:
        raise TraincastError("give --store DIR, which 'traincast bench' filled; --data DIR rebuilds shipped profiles")
    if shipped is None:
        raise missing_evaluation("give a --store that 'traincast bench' filled; rebuilding the shipped profiles")
    return int(shipped.run(args))


def _fit_traces(args: argparse.Namespace) -> int:
    """Corrects the shipped models of a GPU and its host by traces."""
    if not args.refine or args.clock:
        raise TraincastError("--from-trace corrects a GPU that is built in: name it with --refine, and nothing else")
    found = refine_from_traces(*args.from_trace, platform=args.refine, out=args.out)
    print_result(found, Refined.headline, as_json=args.json)
    return 0


def _fit_store(args: argparse.Namespace) -> int:
    """Fits the profile of the machine that a store was measured on, or corrects the shipped one of its GPU."""
    if args.refine is not None:
        print_result(refine(args.store, args.refine, out=args.out), Refined.headline, as_json=args.json)
        return 0
    calibrated = fit_store(args.store, out=args.out, clock=args.clock or "wall")
    print_result(calibrated, Calibrated.headline, as_json=args.json)
    return 0
