"""Whether a step fits in the memory of its GPUs: 0 when it does, 1 when it does not.

The verdict comes first, with its probability, then what fills the device at the peak and, where the step does not fit,
changes under which it would, tried and predicted, the cheapest first. Allocated is what tensors take, reserved what
PyTorch's caching allocator holds for them (replayed step by step), used what nvidia-smi shows: reserved, the CUDA
context and buffers of collectives. '--max batch-size' finds the largest batch that fits, '--max seq-len' the longest
sequence, '--max rows' how many times as many rows all embedding tables may have. '--snapshot-out' writes the replayed
allocator for PyTorch's memory viewer (pytorch.org/memory_viz), which opens a FILE.pickle; another name makes it JSON.
WORKLOAD, PLATFORM and options are those of 'traincast predict'.
"""

from __future__ import annotations

import argparse

from traincast.app.api import fits
from traincast.app.cli.arguments import (
    add_scenario_file,
    add_scenario_options,
    parse_path,
    read_scenario_values,
    require_question,
)
from traincast.app.cli.output import check_outputs, print_result, show_progress_bar
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.app.report.choices import format_fit
from traincast.planner.fitting import AXES
from traincast.simulator.memory.snapshot import write_snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?")
    parser.add_argument("--on", metavar="PLATFORM", help="a GPU or node, or a description (.toml)")
    add_scenario_file(parser)
    parser.add_argument("--max", choices=tuple(AXES), help="the largest of these that fits")
    parser.add_argument(
        "--snapshot-out", type=parse_path, metavar="FILE", help="the allocator's blocks, for PyTorch's memory viewer"
    )
    add_scenario_options(parser)


def run(args: argparse.Namespace) -> int:
    """Predicts, weighs and prints."""
    check_outputs(args.snapshot_out, inputs=[args.workload, args.on, args.file])
    values = read_scenario_values(args)
    require_question(values, "fits")
    with show_progress_bar("fits") as progress:
        result = fits(max=args.max, progress=progress, **values)
    if args.snapshot_out:
        write_snapshot(args.snapshot_out, result.memory)
    print_result(result, format_fit, as_json=args.json, options=args.options)
    return OK if result.fits else CHECK_FAILED
