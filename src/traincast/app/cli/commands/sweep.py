"""Many points of a step: every combination of batch sizes, platforms, GPUs and edits, into a table and a picture.

WORKLOAD and PLATFORM are what 'traincast predict' takes, with its options. '--vary batch-size=512,1024,2048' gives the
values of an edit (see 'traincast whatif --list'), '--vary on=v100,h100' platforms, '--vary gpus=1:8:x2' a range,
'--vary apply=none,cuda-graph' edits without values ('a+b' are two together). Or '--file SWEEP.yaml' has
fields of the scenario (workload, on, ...) and vary.

'--out' (.csv, .parquet) receives all rows. A sweep that was interrupted goes on when the same command is given again.
Points run on all cores. A point that cannot be predicted is listed and stops no other. Exit code 1: no point could be
predicted.
"""

from __future__ import annotations

import argparse
from typing import Any

from traincast.app.api import sweep
from traincast.app.cli.arguments import (
    PRICES_HELP,
    WORKLOAD_HELP,
    add_processes_option,
    add_scenario_options,
    parse_path,
    read_scenario_values,
    require_question,
)
from traincast.app.cli.output import check_outputs, print_result, show_progress_bar
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.app.report.whatif import format_sweep
from traincast.planner.what_if.money import choose_prices
from traincast.planner.what_if.sweeps.points import check_options, read_varied_values
from traincast.utils.errors import TraincastError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=WORKLOAD_HELP)
    parser.add_argument("--on", metavar="PLATFORM", help="default: the first of '--vary on=...'")
    parser.add_argument("--vary", action="append", default=[], metavar="EDIT=VALUES", help="may be given several times")
    parser.add_argument("--file", type=parse_path, metavar="FILE", help="fields of the scenario and 'vary' in YAML")
    parser.add_argument("--out", "-o", type=parse_path, metavar="FILE", help="all rows (.csv, .parquet)")
    parser.add_argument("--image", type=parse_path, metavar="FILE", help="time over cost (.svg)")
    parser.add_argument("--price", metavar="PRICES", help=PRICES_HELP)
    add_processes_option(parser)
    add_scenario_options(parser)


def run(args: argparse.Namespace) -> int:
    """Sweeps and prints."""
    check_outputs(args.out, args.image, inputs=[args.file, args.workload])
    values = read_scenario_values(args, also=("vary", "price", "options"))
    asked = {"vary": _read_axes(args, values.pop("vary", None)), "price": values.pop("price", None)}
    if args.price is not None:
        asked["price"] = choose_prices(args.price)[0]
    values = {**check_options(values.pop("options", None)), **values}
    if "on" not in values and "on" in asked["vary"]:
        values["on"] = asked["vary"]["on"][0].split(",")[0].strip()
    require_question(values, "sweep")
    with show_progress_bar("sweep") as progress:
        result = sweep(out=args.out, image=args.image, processes=args.processes, progress=progress, **asked, **values)
    print_result(result, format_sweep, as_json=args.json)
    return OK if len(result.failed) < len(result.rows) else CHECK_FAILED


def _read_axes(args: argparse.Namespace, told: Any) -> dict[str, list[str]]:
    """The axes of the file, and those of options."""
    vary = read_varied_values(told, str(args.file))
    for text in args.vary:
        name, equals, values = text.partition("=")
        if not equals:
            raise TraincastError(f"--vary {text}: write EDIT=VALUES, such as batch-size=512,1024")
        vary.setdefault(name.strip(), []).append(values)
    return vary
