"""GEMM device times against a profile of DLRM on a V100 at 1297 MHz, outside every training set."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from traincast.costs.kernels.call import Calls, KernelCall
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.costs.kernels.model import load_state
from traincast.costs.kernels.shipped import PROFILES
from traincast.costs.measured_tables import read_table, refuse
from traincast.hardware import load_device
from traincast.utils.metrics import ErrorRow, error_row

CLOCK_MHZ = 1297.0
"""The study's locked SM clock."""

_WITH_SHAPES = "2021-04-09"
_LAYOUTS = {"tn": (0, 1), "nn": (0, 0), "nt": (1, 0)}  # BLAS names, columns first: (trans_a, trans_b) rows first
_SHAPE = re.compile(r"\((\d+(?:, \d+)*),?\)")


def evaluate_gemm_timeline(data: Path, profile: Path = PROFILES / "gemm") -> list[ErrorRow]:
    """One row: every GEMM kernel of the snapshot that recorded shapes."""
    text = ("snapshot", "kernel_name", "op_input_shapes")
    table = read_table(data, "kernels/dlrm_kernel_timeline_v100.parquet", text, ("duration_us_median",),
                       positive=("duration_us_median",), optional=("op_input_shapes",))  # fmt: skip
    chosen = [
        str(snapshot).startswith(_WITH_SHAPES) and "gemm" in str(name)
        for snapshot, name in zip(table.text("snapshot"), table.text("kernel_name"), strict=True)
    ]
    table = table.take(np.array(chosen))
    shapes = [_two_shapes(str(value)) for value in table.text("op_input_shapes")]
    odd = [row for row, pair in enumerate(shapes) if pair is None]
    refuse(table, "op_input_shapes", [(row, "are not the shapes of two matrices") for row in odd])
    calls = [_call(str(name), *pair) for name, pair in zip(table.text("kernel_name"), shapes, strict=True) if pair]
    measured = 1e-6 * table.number("duration_us_median")
    model = GemmModel.from_state(load_state(profile))
    estimate = model.predict(Calls.of(GEMM, calls), load_device("v100").at_clock(CLOCK_MHZ))
    names = ["x".join(f"{size:.0f}" for size in call.values[:4]) for call in calls]
    group = f"DLRM_MLPerf, V100 at {CLOCK_MHZ:.0f} MHz"
    return [error_row("dlrm_kernel_timeline_v100 GEMM", group, estimate.seconds, measured, names)]


def _two_shapes(text: str) -> tuple[list[int], list[int]] | None:
    """The last two shapes of a list, where they are matrices or batches of them."""
    shapes = [[int(size) for size in shape.split(", ")] for shape in _SHAPE.findall(text)[-2:]]
    return (shapes[0], shapes[1]) if [len(shape) for shape in shapes] in ([2, 2], [3, 3]) else None


def _call(kernel: str, left: list[int], right: list[int]) -> KernelCall:
    batch = left[0] if len(left) == 3 else 1
    trans_a, trans_b = _LAYOUTS.get(kernel[-2:], (0, 0))
    return GEMM.call(
        "bmm" if len(left) == 3 else "mm", "fp32",
        batch=batch, m=left[-2], n=right[-1], k=left[-1], trans_a=trans_a, trans_b=trans_b, bias=0,
    )  # fmt: skip
