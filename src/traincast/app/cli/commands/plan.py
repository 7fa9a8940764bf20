"""How to train a Transformer on a given number of GPUs: the layout with the fastest step that fits in memory.

MODEL is built in (llama3-70b), a short YAML description, or a Hugging Face config.json. PLATFORM is a node (see
'traincast platforms') or your own description. Tensor, pipeline, context and expert parallelism, a distributed
optimizer or FSDP, micro-batches and recomputation are searched; the best ten are printed, and what makes the others
slower. The step is '--global-batch' samples, or as many as hold '--tokens-per-step'. All are searched under the same
settings as 'traincast predict' has; '--json' gives the command that predicts each row.
"""

from __future__ import annotations

import argparse

from traincast.app.api import plan
from traincast.app.cli.arguments import add_processes_option, parse_count
from traincast.app.cli.output import print_result
from traincast.app.cli.progress import show_progress_bar
from traincast.app.cli.registry import OK
from traincast.app.cli.scenario import add_scenario_options, read_scenario_values
from traincast.app.report.training import format_plan
from traincast.planner.parallelism.plan import PLANNED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="MODEL")
    parser.add_argument("--on", metavar="PLATFORM", required=True)
    parser.add_argument("--tokens-per-step", type=int, metavar="N", help="tokens of a step, instead of --global-batch")
    parser.add_argument("--price", type=float, metavar="X", help="dollars of one GPU for an hour")
    parser.add_argument("--tokens", type=parse_count, metavar="N", help="tokens of the whole training, such as 15T")
    add_processes_option(parser)
    add_scenario_options(parser, [name for name in PLANNED if name not in ("workload", "on")])


def run(args: argparse.Namespace) -> int:
    """Searches and prints."""
    own = {name: getattr(args, name) for name in ("tokens_per_step", "price", "tokens", "processes")}
    with show_progress_bar("plan") as progress:
        result = plan(progress=progress, **own, **{"gpus": None, **read_scenario_values(args)})
    print_result(result, format_plan, as_json=args.json)
    return OK
