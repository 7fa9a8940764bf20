"""Measures this machine: microbenchmarks of every kind of op, into a store that 'traincast fit --store' reads.

Shapes are drawn in log space, seeded; a reference kernel runs alongside every sample, so that the drift of the machine
divides out. The store is a folder of Parquet files: an interrupted run goes on where it stopped. A store holds one
device, one set of libraries and one number of threads; anything else is rejected.

'--for WORKLOAD' measures only the ops of that step, most valuable first, and says how much of its time is covered.
'--dry-run' says what would be measured and for how long; it needs no device. '--self-check' is for a device nobody has
tried: it runs each part of the measuring once and prints a report to paste into an issue.
"""

from __future__ import annotations

import argparse
import sys

from traincast.app.api import bench, self_check
from traincast.app.cli.arguments import add_scenario_options, parse_path
from traincast.app.cli.output import print_result, show_progress_bar
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.calibration.here import Benched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", default="10m", metavar="TIME", help="how long to measure: 90s, 5m (default 10m)")
    parser.add_argument("--store", type=parse_path, metavar="DIR", help="the store (default: one per device)")
    parser.add_argument("--for", dest="workload", metavar="WORKLOAD", help="only the ops of this step")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the shapes")
    parser.add_argument("--clock-mhz", type=float, default=0.0, metavar="N", help="the clock that the GPU is locked to")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be measured")
    parser.add_argument("--self-check", action="store_true", help="try every part once and print a report")
    add_scenario_options(parser, ("batch_size", "seq_len"))


def run(args: argparse.Namespace) -> int:
    """Measures, or says what it would do."""
    if args.self_check:
        report = self_check(args.device)
        print_result(report, type(report).headline, as_json=args.json)
        return OK if report.passed else CHECK_FAILED
    with show_progress_bar("bench") as progress:
        result = bench(
            device=args.device,
            budget=args.budget,
            store=args.store,
            workload=args.workload,
            seed=args.seed,
            dry_run=args.dry_run,
            clock_mhz=args.clock_mhz,
            progress=progress,
            covered=lambda notes: print(notes, file=sys.stderr),
            batch_size=args.batch_size,
            seq_len=args.seq_len,
        )
    print_result(result, Benched.headline, as_json=args.json)
    return OK
