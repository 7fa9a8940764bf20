"""One HTML file to show: the number and its evidence, why, the timeline, memory, what-ifs, provenance.

SOURCE is what 'traincast predict' takes (then give '--on' and the options of predict; '--gpus 1,2,4,8' makes a scaling
curve), or measured traces as 'traincast trace' takes them (with '--on' they are predicted too).

The file needs nothing else: no network, no server. '--price' is dollars of one GPU for an hour.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from traincast.api import trace, write_report
from traincast.cli.arguments import file_path
from traincast.cli.commands.predict import add_prediction_options, answered
from traincast.cli.layouts import add_layout_arguments
from traincast.cli.output import check_outputs, print_result
from traincast.cli.verbs import OK
from traincast.errors import TraincastError
from traincast.pages.sources import is_trace
from traincast.pages.written import WrittenPage
from traincast.results import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("sources", metavar="SOURCE", nargs="+")
    parser.add_argument("-o", "--out", type=file_path, metavar="FILE.html", required=True, help="where the report goes")
    parser.add_argument("--on", metavar="PLATFORM", help="a GPU or node; needed unless SOURCE is a trace")
    parser.add_argument("--price", type=float, metavar="X", help="dollars of one GPU for an hour")
    add_prediction_options(parser)
    add_layout_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answers and writes."""
    check_outputs(args.out, inputs=[*args.sources, args.on])
    print_result(write_report(_answer(args), args.out, price=args.price), WrittenPage.headline, as_json=args.json)
    return OK


def _answer(args: argparse.Namespace) -> Result:
    if all(is_trace(source) for source in args.sources):
        return trace(*(Path(source) for source in args.sources), on=args.on, host=args.host)
    if len(args.sources) > 1:
        raise TraincastError("several SOURCES are for traces, and not all of these are; give one workload")
    if args.on is None:
        raise TraincastError("`on` is missing: name the GPU or node to predict the step on")
    args.workload = args.sources[0]
    return answered(args)
