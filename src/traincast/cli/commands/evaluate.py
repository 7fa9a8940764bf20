"""Accuracy tables: predicted against published measurements, case by case, beside what others score.

The measurements are not part of the package: '--data DIR' (or $TRAINCAST_DATA) names their folder. '--max-mape P'
turns the table into a check: exit code 1 when the mean absolute error of a step exceeds P percent.
"""

from __future__ import annotations

import argparse
import math

from traincast.api import evaluate
from traincast.cli.arguments import file_path
from traincast.cli.output import print_result
from traincast.cli.progress import progress_bar
from traincast.cli.verbs import CHECK_FAILED, OK
from traincast.errors import TraincastError
from traincast.evaluation.suites import SUITES
from traincast.report.evaluation import evaluation_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("suite", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument(
        "--data", type=file_path, metavar="DIR", help="folder of measurements (default: $TRAINCAST_DATA)"
    )
    parser.add_argument("--roofline-only", action="store_true", help="rooflines instead of the fitted kernel models")
    parser.add_argument("--max-mape", type=float, metavar="P", help="exit with 1 when the MAPE exceeds P percent")


def run(args: argparse.Namespace) -> int:
    """Evaluates a suite."""
    if args.max_mape is not None and SUITES[args.suite].table:
        raise TraincastError(f"evaluate {args.suite} has no steps that --max-mape could check; leave it out")
    if args.max_mape is not None and not 0 <= args.max_mape < math.inf:
        raise TraincastError(f"--max-mape {args.max_mape}: give a number of percent from 0")
    with progress_bar(f"evaluate {args.suite}") as progress:
        result = evaluate(args.suite, data=args.data, roofline_only=args.roofline_only, progress=progress)
    print_result(result, evaluation_text, as_json=args.json)
    failed = args.max_mape is not None and not result.mape <= args.max_mape  # also where it is not a number
    return CHECK_FAILED if failed else OK
