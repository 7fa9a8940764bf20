"""Runs a real training step on this machine and says how long it takes.

WORKLOAD is a built-in model (its tables as EmbeddingBags), a DLRM described in YAML, or FILE.py:FUNCTION as
'traincast capture' takes it (FILE.py is run as Python: give only files you trust). One thread on a CPU. A reference
kernel runs between every two steps; the drift-corrected figure is the median ratio to it, and that is what predictions
are compared with. '--clock busy' counts the time of this thread only, for machines that others are using.
On a GPU one more step is recorded for 'traincast trace'; '--trace-out' says where, and does so on a CPU too.
'--gpus 2' lets two processes train together, a DLRM with its tables divided between them, other models under DDP:
over gloo on a CPU, one thread each, or over NCCL. FUNCTION then takes rank and world_size by name.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from traincast.app.api import measure
from traincast.app.cli.arguments import VARIANT, WORKLOAD_HELP, add_scenario_options, parse_path, read_scenario_values
from traincast.app.cli.output import check_outputs, print_result, show_progress_bar
from traincast.calibration.bench.measure import Measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="WORKLOAD", help=WORKLOAD_HELP)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="processes that train together (default 1)")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="most steps to time (default 30)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="N", help="time for them (default 20)")
    parser.add_argument("--clock", choices=("wall", "busy"), default="wall")
    parser.add_argument("--trace-out", type=parse_path, metavar="FILE", help="a Kineto trace of one more step")
    add_scenario_options(parser, [name for name in VARIANT if name != "embedding"])


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    check_outputs(args.trace_out, inputs=[args.workload.rpartition(":")[0]])
    values = {"gpus": 1, **read_scenario_values(args)}
    with contextlib.redirect_stdout(sys.stderr), show_progress_bar("measure") as progress:
        result = measure(
            values.pop("workload"),
            device=args.device,
            repeats=args.repeats,
            seconds=args.seconds,
            clock=args.clock,
            trace_out=args.trace_out,
            progress=progress,
            **values,
        )
    print_result(result, Measured.headline, as_json=args.json)
    return 0
