"""One step on several GPUs side by side: time with its interval, memory, dollars, energy, and what was measured.

'--on a,b,c' names GPUs and nodes; all other options are those of 'traincast predict'. Prices are dollars of one GPU for
an hour: '--price 2.5' for all, '--price h100=2.5,a100-80gb=1.6' by GPU, and the built-in list (dated, printed with the
result) for what is not named; '--price none' leaves dollars out. '--samples' or '--tokens' say how long the run is.
'--image FILE.svg' draws it; 'traincast report MODEL --of compare --on a,b,c' is the page. Exit code 1: it fits nowhere.
"""

from __future__ import annotations

import argparse

from traincast.app.api import compare
from traincast.app.cli.arguments import (
    WORKLOAD_HELP,
    add_scenario_file,
    add_scenario_options,
    parse_count,
    parse_path,
    read_scenario_values,
    require_question,
)
from traincast.app.cli.output import check_outputs, print_result, show_progress_bar
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.app.report.choices import draw_platforms, format_platform_comparison
from traincast.utils.files.writing import write_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=WORKLOAD_HELP)
    parser.add_argument("--on", metavar="PLATFORM,...", help="GPUs and nodes, with commas between")
    parser.add_argument("--price", metavar="PRICES", help="2.5, or h100=2.5,...; 'none' (default: the built-in list)")
    parser.add_argument("--samples", type=parse_count, metavar="N", help="samples of the whole run, such as 4B")
    parser.add_argument("--tokens", type=parse_count, metavar="N", help="tokens of the whole run, such as 15T")
    parser.add_argument("--image", type=parse_path, metavar="FILE", help="bars with intervals (.svg)")
    add_scenario_file(parser)
    add_scenario_options(parser)


def run(args: argparse.Namespace) -> int:
    """Predicts on each and prints."""
    check_outputs(args.image, inputs=[args.workload, args.file])
    values = read_scenario_values(args)
    require_question(values, "compare", "v100,h100")
    names = str(values.pop("on")).split(",")
    with show_progress_bar("compare") as progress:
        result = compare(
            values.pop("workload"), on=names, price=args.price, samples=args.samples, tokens=args.tokens,
            progress=progress, **values,
        )  # fmt: skip
    if args.image:
        write_bytes(args.image, draw_platforms(result).encode())
    print_result(result, format_platform_comparison, as_json=args.json)
    return OK if any(step.prediction.fits for step in result.steps) else CHECK_FAILED
