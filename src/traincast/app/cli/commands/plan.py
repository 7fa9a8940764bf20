"""How to train a Transformer on so many GPUs: the layout with the fastest step that fits in memory.

MODEL is built in (llama3-70b), a short YAML description, or a Hugging Face config.json. PLATFORM is a node (see
'traincast platforms') or your own description. Tensor, pipeline, context and expert parallelism, a distributed
optimizer or FSDP, micro-batches and recomputation are searched; the best ten are printed, and what makes the others
slower. The step is '--global-batch' samples, or as many as hold '--tokens-per-step'.
"""

from __future__ import annotations

import argparse

from traincast.app.api import plan
from traincast.app.cli.arguments import add_workers
from traincast.app.cli.output import print_result
from traincast.app.cli.progress import progress_bar
from traincast.app.cli.verbs import OK
from traincast.app.report.training import plan_text
from traincast.simulator.parallelism.layout import PRECISIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--on", metavar="PLATFORM", required=True)
    parser.add_argument("--gpus", type=int, metavar="N", required=True)
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step (default two a GPU)")
    parser.add_argument("--tokens-per-step", type=int, metavar="N", help="tokens of a step, instead of --global-batch")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens per sample (default: the model's)")
    parser.add_argument("--dtype", choices=PRECISIONS, default="bf16", help="arithmetic (default bf16)")
    parser.add_argument("--price", type=float, metavar="X", help="dollars of one GPU for an hour")
    parser.add_argument("--tokens", type=float, metavar="N", help="tokens of the whole training, such as 15e12")
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Searches and prints."""
    with progress_bar("plan") as progress:
        answer = plan(
            args.model,
            on=args.on,
            gpus=args.gpus,
            global_batch=args.global_batch,
            tokens_per_step=args.tokens_per_step,
            seq_len=args.seq_len,
            dtype=args.dtype,
            price=args.price,
            tokens=args.tokens,
            workers=args.processes,
            progress=progress,
        )
    print_result(answer, plan_text, as_json=args.json)
    return OK
