"""A workload as an execution trace that other tools read.

'--to pytorch' writes the JSON of PyTorch's ExecutionTraceObserver, '--to chakra' a Chakra protobuf trace.
"""

from __future__ import annotations

import argparse

from traincast.app.api import export
from traincast.app.cli.arguments import file_path, variant_options
from traincast.app.cli.output import check_outputs, print_result
from traincast.simulator.scenario.export import FORMATS, Exported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("workload", metavar="WORKLOAD")
    parser.add_argument("-o", "--out", type=file_path, required=True, metavar="OUT")
    parser.add_argument("--to", choices=FORMATS, default="pytorch")
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--seq-len", type=int, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Exports rank 0."""
    check_outputs(args.out, inputs=[args.workload])
    result = export(args.workload, args.out, to=args.to, **variant_options(args))
    print_result(result, Exported.headline, as_json=args.json)
    return 0
