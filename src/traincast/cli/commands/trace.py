"""What measured traces say: every step, where its time went, and whether a replay of it agrees.

FILES are Kineto traces (.json, .json.gz), with or without the PyTorch execution traces of the same run, or folders of
them, one file per rank. Idle time is given with its reason, host time by the five overheads (T1 between two ops, T2
before an op's first launch, T3 after its last, T4 a runtime call, T5 between launches).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from traincast.cli.output import print_json, print_text, write_json_file
from traincast.report.measured import measured_json, measured_text
from traincast.report.measured_chrome import measured_chrome_trace
from traincast.simulate.measured import analyse_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("files", metavar="FILES", nargs="+", type=Path)
    parser.add_argument(
        "--trace-out",
        type=Path,
        metavar="FILE",
        help="measured and replayed timelines for Perfetto (Chrome trace JSON)",
    )


def run(args: argparse.Namespace) -> int:
    """Reads, measures and prints."""
    report = analyse_traces(args.files)
    if args.trace_out:
        write_json_file(args.trace_out, measured_chrome_trace(report))
    if args.json:
        print_json(measured_json(report))
    else:
        print_text(measured_text(report))
    return 0
