"""A table of shares of the peak that kernels reach in training runs on B200, as seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from traincast.utils.arrays import FloatArray
from traincast_evaluation.measured_tables import MeasuredTable, check_positive, read_table

FILE = "kernels/b200_efficiency.csv"
SOURCE = "MooreThreads/SimuMax @ 4dcaae51 (Apache-2.0)"
DEVICE = "b200"
OPS = ("matmul", "group_matmul", "sdp_fwd", "sdp_bwd")


def read_efficiency(data: Path, ops: Sequence[str], text: Sequence[str], numbers: Sequence[str]) -> MeasuredTable:
    """The rows of these ops, with the columns that describe them (`numbers`: all above zero)."""
    table = read_table(
        data, FILE, ("op", *text), ("peak_tflops", "efficiency", *numbers),
        positive=("peak_tflops", "efficiency"), among={"op": OPS}, optional=(*text, *numbers),
    )  # fmt: skip
    table = table.take(np.isin(table.text("op").astype(str), list(ops)))
    for column in numbers:
        check_positive(table, column)
    return table


def convert_efficiency_to_seconds(table: MeasuredTable, flop: FloatArray) -> FloatArray:
    """Seconds of kernels with this many operations, as their source counts them."""
    return np.asarray(flop / (1e12 * table.number("peak_tflops") * table.number("efficiency")))
