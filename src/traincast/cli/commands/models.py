"""The built-in models: parameters, ops and kernels of one training step.

'--coverage' shows for every op of every built-in how it is lowered to kernels, and which ops fall back to an
estimate from their bytes.
"""

from __future__ import annotations

import argparse
from typing import Any

from traincast.api import load
from traincast.cli.output import print_json, print_text
from traincast.display.text import count, table
from traincast.kernels.coverage import coverage
from traincast.kernels.registry import lowering_context
from traincast.zoo.catalog import ModelInfo, list_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("--coverage", action="store_true", help="how every op is lowered")


def run(args: argparse.Namespace) -> int:
    """Lists the models or their coverage."""
    if args.coverage:
        rows = [row for info in list_models() for row in _coverage(info)]
        header: tuple[str, ...] = ("model", "op", "count", "kernels", "lowered")
        right: tuple[int, ...] = (2, 3)
    else:
        rows = [_summary(info) for info in list_models()]
        header = ("model", "parameters", "batch", "tokens", "ops", "kernels", "what it is")
        right = (1, 2, 3, 4, 5)
    if args.json:
        print_json(rows)
    else:
        print_text(table(header, [_cells(row, args.coverage) for row in rows], right=right))
    return 0


def _cells(row: dict[str, Any], coverage_asked: bool) -> tuple[str, ...]:
    if coverage_asked:
        lowered = "yes" if row["lowered"] else "estimated"
        return row["model"], row["op"], str(row["count"]), str(row["kernels"]), lowered
    sizes = (count(row["parameters"]), str(row["batch_size"]), str(row["seq_len"] or "-"))
    return row["model"], *sizes, str(row["ops"]), str(row["kernels"]), row["description"]


def _coverage(info: ModelInfo) -> list[dict[str, Any]]:
    workload = load(info.name)
    return [
        {"model": info.name, "op": op.name, "count": op.count, "kernels": op.launches, "lowered": op.lowered}
        for op in coverage(workload.programs[0], lowering_context(workload))
    ]


def _summary(info: ModelInfo) -> dict[str, Any]:
    workload = load(info.name)
    rows = coverage(workload.programs[0], lowering_context(workload))
    return {
        "model": info.name,
        "description": info.description,
        "parameters": info.parameters,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len or None,
        "ops": workload.programs[0].num_ops,
        "kernels": sum(row.launches for row in rows),
        info.axis or "variants": list(info.choices),
        "optimizers": list(info.optimizers),
    }
