"""One HTML file to show: the number and its evidence, why, the timeline, memory, what-ifs, provenance.

SOURCE is what 'traincast predict' takes (then give '--on' and the options of predict; '--gpus 1,2,4,8' makes a
scaling curve), or measured traces as 'traincast trace' takes them: with '--on' they are predicted too, with '--
against' they are compared with another run. What 'traincast evaluate --json' or 'traincast sweep --json' printed
(.json) is a SOURCE too. '--of plan' searches layouts of a Transformer as 'traincast plan' does, '--of sharding' a
plan for embedding tables as 'traincast shard' does, '--of compare' GPUs of '--on a,b,c' as 'traincast compare' does,
'--of advice' edits as 'traincast whatif --advise' does; '--set' and '--apply' show what an edit would bring.

The file needs nothing else: no network, no server. '--price' is dollars of one GPU for an hour.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from traincast.app.api import advise, compare, fits, plan, shard, trace, whatif, write_report
from traincast.app.cli.arguments import (
    add_edit_arguments,
    add_scenario_file,
    parse_one_gpu_number,
    parse_path,
    parse_price,
    read_edits,
    read_scenario_values,
)
from traincast.app.cli.commands.predict import add_curve_options, predict_asked
from traincast.app.cli.output import check_outputs, print_result, show_progress_bar
from traincast.app.cli.registry import OK
from traincast.app.pages.decisions import read_sweep_page
from traincast.app.pages.parts import is_evaluation, is_sweep, is_trace
from traincast.app.pages.writing import WrittenPage, write_page
from traincast.utils.errors import TraincastError
from traincast.utils.plugins import PAGES, require_plugin
from traincast.utils.results import Result

KINDS = ("prediction", "fits", "compare", "plan", "sharding", "advice")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="+", help="what predict takes, measured traces, or JSON of a sweep"
    )
    parser.add_argument(
        "-o", "--out", type=parse_path, metavar="FILE.html", required=True, help="where the report goes"
    )
    parser.add_argument("--on", metavar="PLATFORM", help="a GPU or node; needed unless SOURCE was measured")
    parser.add_argument("--of", choices=KINDS, default="prediction", help="what to make of a workload")
    parser.add_argument("--price", metavar="PRICE", help="dollars of one GPU for an hour, or 'list'")
    parser.add_argument("--against", metavar="TRACE", help="a traced run to compare a trace with")
    add_edit_arguments(parser)
    add_scenario_file(parser)
    add_curve_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answers and writes."""
    check_outputs(args.out, inputs=[*args.sources, args.on, args.against])
    if args.price is not None and args.of != "compare":
        args.price = parse_price(args.price, args.on)
    if args.out.suffix not in (".html", ".htm"):
        raise TraincastError(f"-o {args.out}: a report is HTML; give a name that ends in .html (print it for PDF)")
    print_result(_write_asked(args), WrittenPage.headline, as_json=args.json)
    return OK


def _write_asked(args: argparse.Namespace) -> WrittenPage:
    if all(is_trace(source) for source in args.sources):
        before = None if args.against is None else trace(Path(args.against))
        result = trace(*(Path(source) for source in args.sources), on=args.on, host=args.host)
        return write_report(result, args.out, price=args.price, against=before)
    if args.against is not None:
        raise TraincastError("--against compares traced runs; give a trace as SOURCE")
    if len(args.sources) > 1:
        raise TraincastError("several SOURCES are for traces, and not all of these are; give one workload")
    if args.sources[0].endswith(".csv") and args.on is None:
        raise TraincastError(
            "a sweep's report is made of its JSON: 'traincast sweep ... --json > sweep.json', then 'traincast report "
            "sweep.json'; for embedding tables give --of sharding and --on"
        )
    if is_sweep(args.sources[0]):
        return write_page(read_sweep_page(Path(args.sources[0])), args.out)
    if is_evaluation(args.sources[0]):
        pages = require_plugin(PAGES, "evaluation", "the report of an evaluation")
        return write_page(pages.read_evaluation_page(Path(args.sources[0])), args.out)
    answer = _predict_source(args)
    return write_report(answer, args.out, price=None if args.of == "compare" else args.price)  # its page has prices


def _predict_source(args: argparse.Namespace) -> Result:
    """What was asked of a workload: a prediction, a search for layouts, or one for places of tables."""
    if args.on is None:
        raise TraincastError("`on` is missing: name the GPU or node to predict the step on")
    args.workload = args.sources[0]
    edits = read_edits(args)
    if args.of == "prediction" and not edits:
        return predict_asked(args)
    if args.scaling:
        raise TraincastError("--scaling is for predictions; leave it out")
    values = {**read_scenario_values(args), **parse_one_gpu_number(args)}
    if args.of == "prediction":
        return whatif(edits=edits, price=args.price, **values)
    with show_progress_bar(args.of) as progress:
        if args.of == "compare":
            names = str(values.pop("on")).split(",")
            return compare(values.pop("workload"), on=names, price=args.price, progress=progress, **values)
        if args.of == "fits":
            return fits(progress=progress, **values)
        if args.of == "advice":
            return advise(price=args.price, progress=progress, **values)
        if args.of == "sharding":
            return shard(values.pop("workload"), progress=progress, **{"gpus": 1, **values})
        return plan(price=args.price, progress=progress, **{"gpus": 1, **values})
