"""Accuracy tables: predicted against published measurements, case by case, alongside what others score.

The measurements are not part of the package: '--data DIR' (or $TRAINCAST_DATA) names their folder. '--max-mape P'
turns the table into a check: exit code 1 when the mean absolute error of a step exceeds P percent.

'here' and 'sharding' need no data: they predict training steps on this machine from its profile ('traincast bench',
then 'traincast fit --store'), write the predictions down, and only then run the steps, in one process and on two ranks
over gloo. '--minutes' stops them, and 'timm' and 'torchvision' (default 30), after a seeded share of the steps; called
again they go on.
"""

from __future__ import annotations

import argparse
import math

from traincast.app.cli.arguments import parse_path
from traincast.app.cli.output import print_result, show_progress_bar
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.utils.errors import TraincastError
from traincast_evaluation.api import evaluate
from traincast_evaluation.report import format_evaluation
from traincast_evaluation.suites.registry import SUITES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("suite", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument(
        "--data", type=parse_path, metavar="DIR", help="folder of measurements (default: $TRAINCAST_DATA)"
    )
    parser.add_argument("--on", metavar="PROFILE", help="here, sharding: a fitted profile (default here)")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="here, sharding, timm, timm-inference, torchvision: stop then"
    )
    parser.add_argument("--tasks", type=int, metavar="N", help="here, sharding: random DLRMs (default 40; 20)")
    parser.add_argument("--seed", type=int, metavar="N", help="here, sharding: of the random DLRMs (default 0)")
    parser.add_argument("--roofline-only", action="store_true", help="rooflines instead of the fitted kernel models")
    parser.add_argument("--max-mape", type=float, metavar="P", help="exit with 1 when the MAPE exceeds P percent")


def run(args: argparse.Namespace) -> int:
    """Evaluates a suite."""
    if args.max_mape is not None and SUITES[args.suite].table:
        raise TraincastError(f"evaluate {args.suite} has no steps that --max-mape could check; leave it out")
    if args.max_mape is not None and not 0 <= args.max_mape < math.inf:
        raise TraincastError(f"--max-mape {args.max_mape}: give a number of percent from 0")
    with show_progress_bar(f"evaluate {args.suite}") as progress:
        result = evaluate(
            args.suite, data=args.data, roofline_only=args.roofline_only, on=args.on, minutes=args.minutes,
            tasks=args.tasks, seed=args.seed, progress=progress,
        )  # fmt: skip
    print_result(result, format_evaluation, as_json=args.json)
    failed = args.max_mape is not None and not result.mape <= args.max_mape  # also where it is not a number
    return CHECK_FAILED if failed else OK
