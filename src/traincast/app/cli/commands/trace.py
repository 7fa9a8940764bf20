"""What measured traces say: every step, where its time went, and whether a replay of it agrees.

FILES are Kineto traces (.json, .json.gz), with or without the PyTorch execution traces of the same run, or folders of
them, one file per rank. Idle time is given with its reason, host time by the five overheads (T1 between two ops, T2
before an op's first launch, T3 after its last, T4 a runtime call, T5 between launches). With '--on' the traced step is
also predicted, from the shapes of its ops and its own host times (or with '--host' a profile), and the error is split
into what the simulation, the kernels and the overheads add to it.

Tables of what a profiler's page shows (kernels, rates by op and shape, modules, collectives, launches, memory) come
with '--top' rows each; '--tables-out DIR' writes them whole. With '--compare' the first of two traces (or folders) is
compared with the second: what changed, matched by op and shape. The first may be a prediction of the run that
'traincast predict --json' printed: then by op and, where the trace names them, by module.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from traincast.app.api import compare_traces, trace
from traincast.app.cli.arguments import parse_path
from traincast.app.cli.output import TABLE_FORMATS, check_folder, check_outputs, print_json, print_text, write_tables
from traincast.app.report.compared import format_comparison
from traincast.app.report.measured import TOP, format_measured
from traincast.app.report.measured_chrome import make_measured_chrome_trace
from traincast.ir.file import save_workload
from traincast.traces.replay.workload import trace_workload
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_json

_MOST_ROWS = 10_000  # of a table that somebody reads; '--tables-out' has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("files", metavar="FILES", nargs="+", type=parse_path)
    parser.add_argument(
        "--trace-out",
        type=parse_path,
        metavar="FILE",
        help="measured, replayed and predicted timelines for Perfetto (Chrome trace JSON)",
    )
    parser.add_argument(
        "--workload-out",
        type=parse_path,
        metavar="FILE.tc",
        help="one step of the traced run as a workload, to be predicted elsewhere",
    )
    parser.add_argument("--on", metavar="PLATFORM", help="predict the traced step on this GPU or node and compare")
    parser.add_argument(
        "--host",
        metavar="PROFILE",
        help="host profile, or 'platform' for the platform's own (default: the host times of the trace itself)",
    )
    parser.add_argument(
        "--host-scale",
        type=float,
        metavar="N",
        help="how many times as slow as the profile's the host is (default: as the trace's launch calls say)",
    )
    parser.add_argument(
        "--twice",
        action="append",
        default=[],
        metavar="NAME",
        help="what a step would gain if this op, this kernel family or 'host' were twice as fast; may be repeated",
    )
    parser.add_argument(
        "--step-marker",
        default="",
        metavar="NAME",
        help="op or annotation at which steps begin, '*' for anything (default: ProfilerStep, else an optimizer's "
        "steps, else annotations that call themselves steps, else the period of the kernels)",
    )
    compared = "the second trace against the first, or against a saved prediction: what changed, and why"
    parser.add_argument("--compare", action="store_true", help=compared)
    parser.add_argument(
        "--top", type=_parse_rows, metavar="N", help=f"all tables, with this many rows each (default {TOP})"
    )
    parser.add_argument("-v", "--full", action="store_true", help="all tables, of every rank")
    parser.add_argument("--tables-out", type=parse_path, metavar="DIR", help="all tables as files in this folder")
    parser.add_argument(
        "--tables-format", choices=TABLE_FORMATS, default=TABLE_FORMATS[0], help="of those files (default csv)"
    )


def _parse_rows(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MOST_ROWS:
        raise ValueError(text)
    return number


def _list_inputs(path: Path) -> list[Path]:
    """The file itself, or the files of the folder."""
    with suppress(OSError, ValueError):
        if path.is_dir():
            return list(path.iterdir())
    return [path]


def run(args: argparse.Namespace) -> int:
    """Reads, measures and prints."""
    check_folder(args.tables_out)
    if args.compare:
        return _compare(args)
    check_outputs(
        args.trace_out, args.workload_out, inputs=[file for path in args.files for file in _list_inputs(path)]
    )
    report = trace(
        *args.files,
        on=args.on,
        host=args.host,
        host_scale=args.host_scale,
        twice=args.twice,
        step_marker=args.step_marker,
    )
    if args.trace_out:
        write_json(args.trace_out, make_measured_chrome_trace(report))
    if args.tables_out:
        write_tables(report, args.tables_out, args.tables_format)
    written = None
    if args.workload_out:
        written = trace_workload(report, name=args.workload_out.stem)
        save_workload(written, args.workload_out)
    if args.json:
        print_json(report.to_dict() | ({"workload": dict(written.meta)} if written else {}))
    else:
        print_text(format_measured(report, args.top or TOP, full=args.full or args.top is not None))
        if written:
            tokens = f" of {written.seq_len} tokens" if written.seq_len else ""
            print_text(
                f"\nWorkload {args.workload_out}: {written.mode}, batch {written.batch_size}{tokens}, "
                f"{len(written.programs)} programs, {len(written.ranks)} ranks"
            )
            print_text("\n".join(f"  {name}: {text}" for name, text in written.meta.items()))
    return 0


def _compare(args: argparse.Namespace) -> int:
    if len(args.files) != 2:
        raise TraincastError(f"--compare takes two traces or folders of ranks; {len(args.files)} were given")
    others = {
        "--on": args.on, "--host": args.host, "--trace-out": args.trace_out, "--workload-out": args.workload_out,
        "--twice": args.twice,
    }  # fmt: skip
    given = [name for name, value in others.items() if value]
    if given:
        raise TraincastError(f"{given[0]} is about one run; leave it out with --compare")
    comparison = compare_traces(*args.files, step_marker=args.step_marker)
    if args.tables_out:
        write_tables(comparison, args.tables_out, args.tables_format)
    if args.json:
        print_json(comparison.to_dict())
    else:
        print_text(format_comparison(comparison, args.top or TOP))
    return 0
