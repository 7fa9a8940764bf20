"""A training step of your own model, captured without a GPU.

FILE.py:FUNCTION names a function that builds model, optimizer and inputs for a batch size in plain PyTorch and
returns a callable that runs one iteration:

    def make_step(batch_size):          # or make_step(batch_size, seq_len)
        ...
        return step                     # step() runs one iteration

The workload written to OUT is predicted with 'traincast predict OUT --on PLATFORM', at any batch size. FILE.py is
run as Python: capture only files you trust.

A script without such a function is captured as it is: 'traincast capture train.py -o OUT --batch-size 64 -- its own
arguments' runs it and records what is between two calls of its optimizer, or a whole cycle of updates that differ.
Nothing it writes or deletes reaches your files, and the network is closed: the answer lists what was kept back.
Where its own arguments have the batch size, write {batch_size} ('-- --batch-size {batch_size}'; also {seq_len}): the
script is then run at several sizes, and the workload can be predicted at any. Without, it keeps its one size, and
'--batch-size' only says which that is (default: the first dimension of what its model is given).

A step on several GPUs (torch.distributed: DistributedDataParallel, fully_shard, your own collectives) is captured
with '--gpus N' from make_step(batch_size, *, rank, world_size), or from a script that torchrun starts or that spawns
its processes itself, rank by rank in this one process; the batch size is that of one rank. '--ranks 0' is enough
when all ranks do the same. '--assume' states what a step reads from tensors (how full a mask is, which way a branch
goes); it is kept with the workload and printed with every result. Plain data parallelism needs no capture of its own:
'traincast predict OUT --gpus N'.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from traincast.app.api import capture
from traincast.app.captures import TIME_LIMIT_S
from traincast.app.cli.arguments import parse_path, parse_whole_numbers
from traincast.app.cli.output import check_outputs, print_json, print_text, show_progress_line
from traincast.simulator.scenario.scenario import list_scenario_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("function", metavar="FILE.py[:FUNCTION]")
    parser.set_defaults(arguments=[])  # of a script that is captured as it is: what follows "--"
    parser.add_argument(
        "-o", "--out", type=parse_path, metavar="OUT", help="the workload file to write (default: FILE.tc)"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="default: 32; of a script, what its model is given")
    parser.add_argument("--seq-len", type=int, metavar="N", help="when FUNCTION takes a sequence length")
    parser.add_argument("--gpus", type=int, metavar="N", help="captures a step on N GPUs")
    parser.add_argument(
        "--ranks", metavar="R[,R...]", help="captures these ranks only; others run that of the one below"
    )
    parser.add_argument(
        "--assume", action="append", metavar="KIND[@FILE:LINE]=VALUE",
        help="what the step reads from tensors: mask=0.15, padding=0.3, branch=false, item=128, lengths=64,128, "
        "distinct=0.4, experts=8 or experts=8:1.5",
    )  # fmt: skip
    parser.add_argument("--costs", type=parse_path, metavar="FILE", help="what ops of your own cost (.toml)")
    parser.add_argument(
        "--as", dest="as_gpu", metavar="GPU", help="what a script that asks is told it runs on (default: a100-80gb)"
    )
    parser.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS",
        help="after which the code is ended (default: 3600); a step that was recorded is kept",
    )  # fmt: skip
    parser.add_argument("--mode", choices=list_scenario_fields()["mode"].choices, default="training")
    parser.add_argument("--name", help="name of the workload (default: the function's; of `make_step` the file's)")


def run(args: argparse.Namespace) -> int:
    """Captures and saves."""
    args.out = args.out or Path(Path(args.function.rpartition(":")[0] or args.function).with_suffix(".tc").name)
    check_outputs(args.out, inputs=[args.function.rpartition(":")[0] or args.function])
    with (
        show_progress_line(f"capturing {args.function}") as progress,
        _hold_warnings(),
        contextlib.redirect_stdout(sys.stderr),  # what the user's code prints is no part of the result
    ):
        workload = capture(
            args.function,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            mode=args.mode,
            name=args.name,
            gpus=args.gpus,
            ranks=None if args.ranks is None else parse_whole_numbers("--ranks", args.ranks),
            out=args.out,
            assume=args.assume,
            costs=args.costs,
            arguments=args.arguments,
            progress=progress,
            as_gpu=args.as_gpu,
            time_limit_s=args.time_limit,
        )
    if args.json:
        print_json({"workload": workload.name, "file": str(args.out)} | workload.to_dict())
    else:
        print_text(f"{args.out}: {workload.contents()}")
    return 0


@contextlib.contextmanager
def _hold_warnings() -> Iterator[None]:
    """Warnings of the user's code and its libraries are printed only if the capture fails."""
    with warnings.catch_warnings(record=True) as held:
        warnings.simplefilter("default")
        try:
            yield
        except BaseException:
            for text in dict.fromkeys(f"{w.filename}:{w.lineno}: {w.message}" for w in held[:5]):
                print(text, file=sys.stderr)
            raise
