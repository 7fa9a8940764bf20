"""Where embedding tables go: searches for the plan with the fastest step, and says why others are slower.

TABLES is a YAML, JSON, CSV or Parquet file of tables (rows or num_embeddings, ...), names with rows, TorchRec's
configs, a DLRM in YAML (its dense part is then in the step), a built-in set (mlperf-dlrm, mlperf-dlrm-v2,
dlrm-2021-856, dlrm-2022-788), or a script that trains with TorchRec: it is captured as one rank runs it, and what it
does besides its tables is in the step ('shard train.py --on ... --gpus 64 -- arguments of the script'). PLATFORM is a
node (see 'traincast platforms') or your own description; several, separated by commas, are compared.
Batch size is per GPU. '--candidates FILE' only ranks the plans of a file. Exit code 1: not even the best plan fits.
"""

from __future__ import annotations

import argparse

from traincast.app.api import shard
from traincast.app.cli.arguments import add_processes_option, parse_path
from traincast.app.cli.output import (
    check_outputs,
    name_options,
    print_json,
    print_result,
    print_text,
    show_progress_bar,
)
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.app.predicting import read_tables
from traincast.app.report.sharding import format_platforms, format_sharding
from traincast.models.embeddings.table import ITEM_BYTES
from traincast.models.placement.plan import convert_plan_to_json
from traincast.planner.sharding.result import ShardingResult
from traincast.planner.sharding.search import write_torchrec_plan
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("tables", metavar="TABLES")
    parser.add_argument("--on", metavar="PLATFORM", required=True)
    parser.add_argument("--gpus", type=int, metavar="N", required=True)
    parser.set_defaults(arguments=[])
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples per GPU (default 2048; of a script its own)"
    )
    parser.add_argument("--dtype", choices=tuple(ITEM_BYTES), help="type of all tables (default: as they say)")
    parser.add_argument(
        "--dense", type=parse_path, metavar="FILE", help="dense part of the model in YAML (default: none)"
    )
    parser.add_argument("--candidates", type=parse_path, metavar="FILE", help="plans to rank, in JSON or YAML")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--time-limit", type=float, metavar="S", help="end the search after about S seconds")
    parser.add_argument("--no-torchrec", action="store_true", help="do not compare with TorchRec's planner")
    add_processes_option(parser)
    parser.add_argument("-o", "--out", type=parse_path, metavar="FILE", help="write the best plan (JSON)")
    parser.add_argument("--torchrec-out", type=parse_path, metavar="FILE", help="write it as TorchRec reads it (JSON)")


def run(args: argparse.Namespace) -> int:
    """Searches or ranks, and prints."""
    places = args.on.split(",")
    check_outputs(args.out, args.torchrec_out, inputs=[args.tables, *places, args.dense, args.candidates])
    if len(places) > 1:
        return _compare_platforms(args, places)
    result = _search(args, args.on)
    if args.out:
        write_json(args.out, convert_plan_to_json(result.best.plan))
    if args.torchrec_out:
        write_json(args.torchrec_out, write_torchrec_plan(args.tables, result.task, result.best.plan))
    written = None if args.out is None else str(args.out)
    print_result(result, lambda shown: format_sharding(shown, written), as_json=args.json, options=args.options)
    return OK if result.best.fits else CHECK_FAILED


def _compare_platforms(args: argparse.Namespace, places: list[str]) -> int:
    """The best plan of every platform, fastest first."""
    if args.out or args.torchrec_out or args.candidates:
        raise TraincastError("a plan is for one platform: give one with --on, or leave out the files of plans")
    args.tables, _ = read_tables(args.tables, args.batch_size, args.arguments)  # of a script one capture for all
    args.arguments = []
    results = sorted((_search(args, place) for place in places), key=lambda result: result.best.seconds)
    if args.json:
        print_json({"platforms": [result.to_dict() for result in results]})
    else:
        print_text(name_options(format_platforms(results), args.options))
    return OK if all(result.best.fits for result in results) else CHECK_FAILED


def _search(args: argparse.Namespace, place: str) -> ShardingResult:
    with show_progress_bar("shard") as progress:
        return shard(
            args.tables,
            on=place,
            gpus=args.gpus,
            batch_size=args.batch_size,
            dtype=args.dtype,
            dense=args.dense,
            candidates=args.candidates,
            seed=args.seed,
            time_limit=args.time_limit,
            torchrec=not args.no_torchrec,
            processes=args.processes,
            arguments=args.arguments,
            progress=progress,
        )
