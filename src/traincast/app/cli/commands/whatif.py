"""What a change of model or hardware would bring: before, after, and whether it is certain.

WORKLOAD and PLATFORM are what 'traincast predict' takes, with its options. '--set batch-size=4096' makes an edit with a
value, '--apply cuda-graph' one without; several are made together. '--list' shows all edits. The interval is that of
the difference: errors that both predictions share are left out of it.

'--advise' tries the edits that apply, alone and in pairs, and ranks them by what a sample gains. '--sensitivity' says
which numbers of the platform the step depends on, and which measurement would narrow its interval most.

'--price' (dollars of one GPU for an hour) gives the cost of a step and of a million samples, with '--samples' or
'--tokens' that of a whole run; energy is an upper limit from the power limit of the GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

from traincast.app.api import advise, list_edits, sensitivity, whatif
from traincast.app.cli.arguments import (
    PLATFORM_HELP,
    WORKLOAD_HELP,
    add_edit_arguments,
    add_money_arguments,
    add_scenario_file,
    add_scenario_options,
    read_edits,
    read_money_options,
    read_scenario_values,
    require_question,
)
from traincast.app.cli.output import print_json, print_result, print_text, show_progress_bar
from traincast.app.cli.registry import OK
from traincast.app.report.whatif import format_advice, format_sensitivity, format_whatif
from traincast.utils.display.text import format_table
from traincast.utils.errors import TraincastError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=WORKLOAD_HELP)
    parser.add_argument("--on", metavar="PLATFORM", help=PLATFORM_HELP)
    add_edit_arguments(parser)
    parser.add_argument("--advise", action="store_true", help="tries all edits that apply, alone and in pairs")
    parser.add_argument("--sensitivity", action="store_true", help="which numbers of the platform matter")
    parser.add_argument("--list", action="store_true", help="shows all edits")
    add_money_arguments(parser)
    add_scenario_file(parser)
    add_scenario_options(parser)


def run(args: argparse.Namespace) -> int:
    """Predicts twice and prints."""
    if args.list:
        return _print_edits(args)
    values = read_scenario_values(args)
    require_question(values, "whatif")
    if args.advise or args.sensitivity:
        return _run_advice_or_sensitivity(args, values)
    result = whatif(edits=read_edits(args), **read_money_options(args), **values)
    print_result(result, format_whatif, as_json=args.json)
    return OK


def _run_advice_or_sensitivity(args: argparse.Namespace, values: dict[str, Any]) -> int:
    """Advice or sensitivity."""
    if read_edits(args) or (args.advise and args.sensitivity):
        raise TraincastError("--advise, --sensitivity and edits are three questions; ask one of them")
    if args.sensitivity:
        given = [name for name, value in read_money_options(args).items() if value is not None]
        if given:
            raise TraincastError(f"--{given[0].replace('_', '-')} says nothing about sensitivity; leave it out")
        result = sensitivity(**values)
        print_result(result, format_sensitivity, as_json=args.json)
        return OK
    with show_progress_bar("advise") as progress:
        advice = advise(progress=progress, **read_money_options(args), **values)
    print_result(advice, format_advice, as_json=args.json)
    return OK


def _print_edits(args: argparse.Namespace) -> int:
    rows = list_edits()
    if args.json:
        print_json(rows)
    else:
        print_text(format_table(("edit", "what it does", "risk"), [(r["edit"], r["what"], r["risk"]) for r in rows]))
    return OK
