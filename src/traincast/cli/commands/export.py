"""A workload as an execution trace that other tools read.

'--to pytorch' writes the JSON of PyTorch's ExecutionTraceObserver, '--to chakra' a Chakra protobuf trace.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from traincast.api import load
from traincast.cli.output import print_json, print_text
from traincast.workload.export_chakra import export_chakra_et
from traincast.workload.export_et import export_pytorch_et


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("workload", metavar="WORKLOAD")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT")
    parser.add_argument("--to", choices=("pytorch", "chakra"), default="pytorch")
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--seq-len", type=int, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Exports rank 0."""
    workload = load(args.workload, batch_size=args.batch_size, seq_len=args.seq_len)
    write = export_pytorch_et if args.to == "pytorch" else export_chakra_et
    write(workload, 0, args.out)
    summary = {
        "workload": workload.name,
        "format": args.to,
        "file": str(args.out),
        "ops": workload.programs[0].num_ops,
    }
    if args.json:
        print_json(summary)
    else:
        print_text(f"{args.out}: {summary['ops']} ops of {workload.name} as a {args.to} execution trace")
    return 0
