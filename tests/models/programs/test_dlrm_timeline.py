"""The captured DLRMs run what the study's profiler saw, op for op."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.zoo.captured import VIEWS
from traincast.ir import Op, Program
from traincast.models.dlrm.config import DLRM_DEFAULT, DLRM_MLPERF, DlrmConfig
from traincast.models.dlrm.program import write_dlrm

SNAPSHOTS = [("2021-08-22", DLRM_DEFAULT), ("2021-05-14", DLRM_MLPERF)]
# until mid-2021 PyTorch copied the index lists of the interaction before the gather, since then within it
EARLIER_COPIES = "module::forward_pass::interaction > aten::to"


def _timeline(shared_data: Path, snapshot: str) -> list[dict[str, Any]]:
    polars = pytest.importorskip("polars")
    table = polars.read_parquet(shared_data / "kernels" / "dlrm_kernel_timeline_v100.parquet")
    rows: list[dict[str, Any]] = table.filter(polars.col("snapshot") == snapshot).sort("position").to_dicts()
    return rows


def _plain(name: str) -> str:
    """Names without what changed between PyTorch versions: `AddmmBackward0`, in-place sums of gradients."""
    return re.sub(r"Backward0$", "Backward", name).replace("aten::add_", "aten::add")


def _launches(op: Op) -> bool:
    return op.name not in VIEWS and any(t.spec.device == "cuda" for t in (*op.inputs, *op.outputs))


def _launching_scopes(program: Program) -> list[str]:
    return [
        _plain(scope.name)
        for scope in program.scopes
        if any(_launches(op) for op in program.ops[scope.first_op : scope.first_op + scope.num_ops])
    ]


@pytest.mark.parametrize(("snapshot", "config"), SNAPSHOTS)
def test_host_ops_that_launch_kernels_are_those_of_the_timeline(
    shared_data: Path, snapshot: str, config: DlrmConfig
) -> None:
    rows = [row for row in _timeline(shared_data, snapshot) if not row["op_path"].endswith(EARLIER_COPIES)]
    by_op = groupby(rows, key=lambda row: (row["op_path"], row["op_occurrence"]))
    measured = [_plain(path.rsplit(" > ", 1)[-1]) for (path, _), _ in by_op]

    assert _launching_scopes(write_dlrm(config, 2048)) == measured


@pytest.mark.parametrize(("snapshot", "config"), SNAPSHOTS)
def test_optimizer_and_zero_grad_launch_once_per_parameter(
    shared_data: Path, snapshot: str, config: DlrmConfig
) -> None:
    rows = {row["op_path"].rsplit(" > ", 1)[-1]: row["kernels_in_row"] for row in _timeline(shared_data, snapshot)}
    scopes = {scope.name: scope.num_ops for scope in write_dlrm(config, 2048).scopes}

    for name in ("Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"):
        assert scopes[name] == rows[name]


def test_matrix_products_have_the_measured_shapes(shared_data: Path) -> None:
    rows = [row for row in _timeline(shared_data, "2021-04-09") if "gem" in row["kernel_name"]]
    measured = [tuple(s for s in ast.literal_eval(row["op_input_shapes"]) if s) for row in rows]
    products = [op for op in write_dlrm(DLRM_MLPERF, 2048).ops if op.name in ("aten::addmm", "aten::mm", "aten::bmm")]

    assert [tuple(t.spec.shape for t in op.inputs) for op in products] == measured
