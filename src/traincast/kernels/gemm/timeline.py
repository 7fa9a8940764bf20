"""GEMM device times against a profile of DLRM on a V100 at 1297 MHz, outside every training set."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from traincast.kernels.call import Calls, KernelCall
from traincast.kernels.gemm import GEMM
from traincast.kernels.gemm.model import GemmModel
from traincast.kernels.model import load_state
from traincast.kernels.shipped import PROFILES
from traincast.measurements.metrics import ErrorRow, error_row
from traincast.measurements.tables import read_table
from traincast.platform import load_device

CLOCK_MHZ = 1297.0
"""The study's locked SM clock."""

_WITH_SHAPES = "2021-04-09"
_LAYOUTS = {"tn": (0, 1), "nn": (0, 0), "nt": (1, 0)}  # BLAS names, columns first: (trans_a, trans_b) rows first
_SHAPE = re.compile(r"\((\d+(?:, \d+)*),?\)")


def evaluate_gemm_timeline(data: Path, profile: Path = PROFILES / "gemm") -> list[ErrorRow]:
    """One row: every GEMM kernel of the snapshot that recorded shapes."""
    text = ("snapshot", "kernel_name", "op_input_shapes")
    table = read_table(data, "kernels/dlrm_kernel_timeline_v100.parquet", text, ("duration_us_median",))
    calls, measured = [], []
    for snapshot, name, shapes, duration in zip(
        *(table.text(column) for column in text), table.number("duration_us_median"), strict=True
    ):
        if str(snapshot).startswith(_WITH_SHAPES) and "gemm" in str(name):
            calls.append(_call(str(name), str(shapes)))
            measured.append(1e-6 * duration)
    model = GemmModel.from_state(load_state(profile))
    estimate = model.predict(Calls.of(GEMM, calls), load_device("v100").at_clock(CLOCK_MHZ))
    names = ["x".join(f"{size:.0f}" for size in call.values[:4]) for call in calls]
    group = f"DLRM_MLPerf, V100 at {CLOCK_MHZ:.0f} MHz"
    return [error_row("dlrm_kernel_timeline_v100 GEMM", group, estimate.seconds, np.array(measured), names)]


def _call(kernel: str, shapes: str) -> KernelCall:
    left, right = ([int(size) for size in shape.split(", ")] for shape in _SHAPE.findall(shapes)[-2:])
    batch = left[0] if len(left) == 3 else 1
    trans_a, trans_b = _LAYOUTS.get(kernel[-2:], (0, 0))
    return GEMM.call(
        "bmm" if len(left) == 3 else "mm", "fp32",
        batch=batch, m=left[-2], n=right[-1], k=left[-1], trans_a=trans_a, trans_b=trans_b, bias=0,
    )  # fmt: skip
