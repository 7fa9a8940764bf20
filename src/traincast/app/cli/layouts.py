"""The options that lay a Transformer over GPUs, for the verbs that have them."""

from __future__ import annotations

import argparse

from traincast.simulator.parallelism.layout import CHECKPOINTS, DISPATCHES, LAUNCHES, SCALINGS, SCHEDULES, Layout
from traincast.simulator.scenario.layouts import OVERLAPS, SHARDING, layout_from

_COUNTS = {
    "tp": "tensor-parallel ranks: they share every matrix",
    "pp": "pipeline stages",
    "vp": "chunks of layers a stage (interleaved schedule)",
    "cp": "ranks that share the tokens of a sample",
    "ep": "ranks that share the experts",
    "etp": "ranks that share one expert",
    "micro-batch": "samples of a micro-batch",
    "global-batch": "samples of a step, all GPUs together",
    "shard-group": "ranks that share parameters (hybrid sharding; default all)",
    "checkpoint-every": "recompute every n-th layer only",
    "lora-rank": "train low-rank adapters of attention of this rank; the model is frozen",
    "frozen-layers": "the first n layers and the table of words are not trained",
    "document-len": "tokens of the documents that samples are packed from",
}
_CHOSEN = ("schedule", "checkpoint", "cp-exchange", "fp8-scaling", "dispatch")


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a layout; any of them makes the step one of a Transformer laid over GPUs."""
    group = parser.add_argument_group("large Transformers on many GPUs")
    for name, text in _COUNTS.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument("--fsdp", type=int, choices=(1, 2), nargs="?", const=2, help="fully sharded data parallel")
    group.add_argument("--zero", type=int, choices=tuple(SHARDING), help="share optimizer (1), gradients (2), all (3)")
    group.add_argument("--no-reshard", action="store_true", help="keep gathered parameters for the backward pass")
    group.add_argument("--no-sequence-parallel", action="store_true", help="tensor parallel without sharing tokens")
    group.add_argument("--schedule", choices=SCHEDULES, help="of pipeline stages (default 1f1b)")
    group.add_argument("--checkpoint", choices=CHECKPOINTS, help="what backward computes again (default none)")
    group.add_argument("--kernels", choices=LAUNCHES, help="who launches kernels (default fused; eager with --fsdp)")
    group.add_argument("--stage-layers", metavar="N,N...", help="layers of each stage (default: as even as they go)")
    group.add_argument("--cp-exchange", choices=("ring", "gather"), help="how keys and values reach others (ring)")
    group.add_argument("--fp8-scaling", choices=SCALINGS, help="what an 8-bit scale belongs to (default tensor)")
    group.add_argument("--fp8-gather", action="store_true", help="FSDP gathers parameters in eight bits")
    group.add_argument("--dispatch", choices=DISPATCHES, help="tokens go to each expert, or once to each node (DeepEP)")
    group.add_argument(
        "--overlap", metavar="KIND,KIND...", help=f"exchanges that run beside kernels: {', '.join(OVERLAPS)}, or none"
    )
    group.add_argument("--no-overlap", action="store_true", help="no exchange runs beside kernels")


def has_layout(args: argparse.Namespace) -> bool:
    """Whether any option of a layout was given."""
    valued = (*_COUNTS, *_CHOSEN, "fsdp", "zero", "stage-layers", "overlap", "kernels")
    flags = (args.no_reshard, args.no_sequence_parallel, args.no_overlap, args.fp8_gather)
    return any(getattr(args, name.replace("-", "_")) is not None for name in valued) or any(flags)


def layout_of(args: argparse.Namespace, gpus: int) -> Layout:
    """The layout that the options describe."""
    return layout_from(vars(args), gpus)
