"""Options of the verbs that change a step: edits and money."""

from __future__ import annotations

import argparse
from typing import Any

from traincast.app.cli.arguments import variant_options, whole_numbers
from traincast.app.cli.commands.predict import add_prediction_options, loader_of
from traincast.app.cli.layouts import add_layout_arguments, has_layout, layout_of
from traincast.utils.errors import TraincastError


def add_scene_arguments(parser: argparse.ArgumentParser) -> None:
    """The step that is changed, as `predict` takes it."""
    add_prediction_options(parser)
    add_layout_arguments(parser)


def add_money_arguments(parser: argparse.ArgumentParser) -> None:
    """What a step costs."""
    parser.add_argument("--price", type=float, metavar="X", help="dollars of one GPU for an hour")
    parser.add_argument("--samples", type=float, metavar="N", help="samples of the whole run, such as 4e9")
    parser.add_argument("--tokens", type=float, metavar="N", help="tokens of the whole run, such as 15e12")
    parser.add_argument("--power-watts", type=float, metavar="X", help="power limit of a GPU (default: its sheet's)")


def add_edit_arguments(parser: argparse.ArgumentParser) -> None:
    """Which edits are made."""
    parser.add_argument("--set", action="append", default=[], metavar="EDIT=VALUE", dest="settings",
                        help="an edit with a value: batch-size=4096; may be given several times")  # fmt: skip
    parser.add_argument("--apply", action="append", default=[], metavar="EDIT",
                        help="an edit without one: cuda-graph; may be given several times")  # fmt: skip


def edits_of(args: argparse.Namespace) -> list[str]:
    """The edits that were given, each as one text."""
    for text in args.settings:
        if "=" not in text:
            raise TraincastError(f"--set {text}: write EDIT=VALUE, or --apply {text} for an edit without a value")
    return [*args.settings, *args.apply]


def scene_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords that say which step it is."""
    if args.scaling or args.skew_ms or args.jitter:
        raise TraincastError("--scaling, --skew-ms and --jitter are for predictions; leave them out")
    gpus = None if args.gpus is None else whole_numbers("--gpus", args.gpus)
    if gpus is not None and len(gpus) > 1:
        raise TraincastError("--gpus takes one number here; give the others as edits (gpus=16) or to 'traincast sweep'")
    options: dict[str, Any] = {
        "gpus": gpus[0] if gpus else None, "clock_mhz": args.clock_mhz, "host": args.host, "program": args.program,
        "cuda_graph": args.cuda_graph, "loader": loader_of(args), "costs": args.costs,
    }  # fmt: skip
    if has_layout(args):
        options["layout"] = layout_of(args, gpus[0] if gpus else 1)
    return {**options, **variant_options(args)}


def money_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords that say what a step costs."""
    names = ("price", "samples", "tokens", "power_watts")
    return {name: getattr(args, name) for name in names}
