"""A gate for CI without a GPU: predicts scenarios and compares them with a stored baseline.

SCENARIO is a YAML file with fields of a scenario ('workload: train.py:make_step', 'on: h100', ...), named by its file.
Without one, all scenarios of the baseline are checked. '--update --reason TEXT' writes the baseline instead. '--gate
step:+3%,memory:+2%,kernels:+5%' says how much worse each may get; what changed is explained by op and module.
Exit code 1: a limit is broken. Programs that scenarios name are run as Python: check only what you trust.
"""

from __future__ import annotations

import argparse

from traincast.app.api import check
from traincast.app.checking import DEFAULT_GATE, CheckResult
from traincast.app.cli.arguments import parse_path
from traincast.app.cli.output import check_outputs, print_result, show_progress_bar
from traincast.app.cli.registry import CHECK_FAILED, OK
from traincast.utils.errors import TraincastError
from traincast.utils.files.writing import write_together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("scenarios", metavar="SCENARIO", nargs="*", help="YAML files (default: all of the baseline)")
    parser.add_argument("--baseline", type=parse_path, metavar="FILE", required=True, help="stored figures (.json)")
    limits = DEFAULT_GATE.replace("%", "%%")
    parser.add_argument("--gate", default=DEFAULT_GATE, metavar="LIMITS", help=f"how much worse (default {limits})")
    parser.add_argument("--update", action="store_true", help="write the baseline; needs --reason")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why it is written anew, kept with it")
    parser.add_argument("--junit", type=parse_path, metavar="FILE", help="the result as JUnit XML too")
    parser.add_argument("--markdown", type=parse_path, metavar="FILE", help="the result as Markdown too")


def run(args: argparse.Namespace) -> int:
    """Checks, writes and prints."""
    check_outputs(args.junit, args.markdown, inputs=[*args.scenarios, args.baseline])
    if args.update != bool(args.reason.strip()):
        raise TraincastError("--update and --reason go together: say why the baseline changes")
    with show_progress_bar("check") as progress:
        result = check(
            args.scenarios, baseline=args.baseline, gate=args.gate, update=args.reason.strip(), progress=progress
        )
    reports = ((args.junit, result.to_junit), (args.markdown, result.to_markdown))
    write_together({path: text().encode() for path, text in reports if path is not None})
    print_result(result, CheckResult.headline, as_json=args.json, options=args.options)
    return OK if result.passed else CHECK_FAILED
