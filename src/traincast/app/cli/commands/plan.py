"""How to train a Transformer on a given number of GPUs: the layout with the fastest step that fits in memory.

MODEL is built in (llama3-70b), a short YAML description, or a Hugging Face config.json. PLATFORM is a node (see
'traincast platforms') or your own description. Tensor, pipeline, context and expert parallelism, a distributed
optimizer or FSDP, micro-batches and recomputation are searched; the best ten are printed, and what makes the others
slower. The step is '--global-batch' samples, or as many as hold '--tokens-per-step'. All are searched under the same
settings as 'traincast predict' has; '--json' gives the command that predicts each row.
'--write torchtitan --out job.sh' writes the best one that torchtitan can run as its launch file; 'traincast predict
MODEL --from job.sh' reads such files back.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from traincast.app.api import plan
from traincast.app.cli.arguments import (
    add_processes_option,
    add_scenario_options,
    parse_count,
    parse_path,
    parse_price,
    read_scenario_values,
)
from traincast.app.cli.output import check_outputs, print_result, show_progress_bar
from traincast.app.cli.registry import OK
from traincast.app.report.choices import format_plan
from traincast.planner.parallelism.launch_files import TOOLS, write_launch_file
from traincast.planner.parallelism.plan import PLANNED, Plan, read_layout
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import write_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="MODEL")
    parser.add_argument("--on", metavar="PLATFORM", required=True)
    parser.add_argument("--tokens-per-step", type=int, metavar="N", help="tokens of a step, instead of --global-batch")
    parser.add_argument("--price", metavar="PRICE", help="dollars of one GPU for an hour, or 'list'")
    parser.add_argument("--tokens", type=parse_count, metavar="N", help="tokens of the whole training, such as 15T")
    parser.add_argument(
        "--write", choices=TOOLS, help="the best layout that this tool can run, as its launch file into --out"
    )
    parser.add_argument("-o", "--out", type=parse_path, metavar="FILE", help="where that goes")
    add_processes_option(parser)
    add_scenario_options(parser, [name for name in PLANNED if name not in ("workload", "on")])


def run(args: argparse.Namespace) -> int:
    """Searches, writes and prints."""
    check_outputs(args.out, inputs=[args.workload, args.on])
    if (args.write is None) != (args.out is None):
        raise TraincastError("--write and --out go together: which tool's file, and where")
    own = {name: getattr(args, name) for name in ("tokens_per_step", "tokens", "processes")}
    own["price"] = None if args.price is None else parse_price(args.price, args.on)
    with show_progress_bar("plan") as progress:
        result = plan(progress=progress, tool=args.write, **own, **{"gpus": None, **read_scenario_values(args)})
    written = _write_best(args.write, result, args.out) if args.write else ""
    print_result(result, lambda found: f"{format_plan(found)}{written}", as_json=args.json)
    return OK


def _write_best(tool: str, result: Plan, out: Path) -> str:
    """Writes the best layout, and says so."""
    layout = read_layout(result.best[0])
    write_bytes(out, write_launch_file(tool, layout, result.model).encode())
    return f"\nwrote {format_path(out)} for {tool}: {layout.described()}"
