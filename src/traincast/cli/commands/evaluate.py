"""Accuracy tables: predicted against published measurements, case by case, beside what others score.

The measurements are not part of the package: '--data DIR' (or $TRAINCAST_DATA) names their folder. '--max-mape P'
turns the table into a check: exit code 1 when the mean absolute error of a step exceeds P percent.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from traincast.cli.data import measurements_folder
from traincast.cli.main import CHECK_FAILED, OK
from traincast.cli.output import print_json, print_text
from traincast.cli.progress import progress_bar
from traincast.errors import TraincastError
from traincast.evaluation.distributed_embeddings import distributed_embeddings_cases
from traincast.evaluation.iterations import SUITES, run_cases, summarise
from traincast.evaluation.multi_gpu import multi_gpu_cases, multi_gpu_notes, summarise_multi_gpu
from traincast.report.evaluation import cases_text, evaluation_json, summary_text

CASES = {**SUITES, "multi-gpu": multi_gpu_cases, "distributed-embeddings": distributed_embeddings_cases}
# suites whose cases are too many to list: a table of error rows and nothing else
TABLES: dict[str, str] = {
    "collectives": "collectives:evaluate_collectives",
    "embedding-access": "embedding_access:evaluate_embedding_access",
    "kernels": "kernels:evaluate_kernels",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    suites = sorted({*CASES, *TABLES})
    parser.add_argument("suite", choices=suites, metavar="SUITE", help=", ".join(suites))
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of measurements (default: $TRAINCAST_DATA)")
    parser.add_argument("--roofline-only", action="store_true", help="rooflines instead of the fitted kernel models")
    parser.add_argument("--max-mape", type=float, metavar="P", help="exit with 1 when the MAPE exceeds P percent")


def run(args: argparse.Namespace) -> int:
    """Evaluates a suite."""
    folder = measurements_folder(args.data)
    if args.suite in TABLES:
        if args.roofline_only or args.max_mape is not None:
            raise TraincastError(f"evaluate {args.suite} takes neither --roofline-only nor --max-mape; leave them out")
        module, name = TABLES[args.suite].split(":")
        with progress_bar(f"evaluate {args.suite}") as progress:
            rows = getattr(import_module(f"traincast.evaluation.{module}"), name)(folder, progress)
        if args.json:
            print_json(evaluation_json(rows, []))
        else:
            print_text(summary_text(rows))
        return OK
    with progress_bar(f"evaluate {args.suite}") as progress:
        outcomes = run_cases(CASES[args.suite](folder), roofline_only=args.roofline_only, progress=progress)
    many = args.suite == "multi-gpu"
    rows = summarise_multi_gpu(outcomes, folder) if many else summarise(args.suite, outcomes)
    if args.json:
        print_json(evaluation_json(rows, outcomes))
    else:
        notes = multi_gpu_notes() if many else ()
        print_text("\n".join([cases_text(outcomes), "", summary_text(rows), *notes]))
    failed = args.max_mape is not None and rows[0].mape > args.max_mape
    return CHECK_FAILED if failed else OK
