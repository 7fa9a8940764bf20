"""A workload as an execution trace that other tools read.

'--to pytorch' writes the JSON of PyTorch's ExecutionTraceObserver, '--to chakra' a Chakra protobuf trace.
"""

from __future__ import annotations

import argparse

from traincast.app.api import export
from traincast.app.cli.arguments import VARIANT, WORKLOAD_HELP, add_scenario_options, parse_path, read_scenario_values
from traincast.app.cli.output import check_outputs, print_result
from traincast.simulator.scenario.catalog import FORMATS, Exported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="WORKLOAD", help=WORKLOAD_HELP)
    parser.add_argument("-o", "--out", type=parse_path, required=True, metavar="OUT")
    parser.add_argument("--to", choices=FORMATS, default="pytorch")
    add_scenario_options(parser, VARIANT)


def run(args: argparse.Namespace) -> int:
    """Exports rank 0."""
    check_outputs(args.out, inputs=[args.workload])
    result = export(out=args.out, to=args.to, **read_scenario_values(args))
    print_result(result, Exported.headline, as_json=args.json)
    return 0
