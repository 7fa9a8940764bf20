"""GEMM predictions beside measurements, read through the stopwatch of the machine that measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.gemm.measured import GemmRows
from traincast.kernels.gemm.model import GemmModel
from traincast.kernels.gemm.stopwatch import as_timed
from traincast.quantiles import Z90

_UNFITTED_FLOOR = 0.003  # quantile of a machine's own readings that stands for its host
_HOST_NOISE = 0.05  # readings near a floor scatter with the host, not with the kernel
_UNFITTED_OFFSET = 0.5  # of the floor: what the fitted machines show


@dataclass(frozen=True, eq=False, slots=True)
class Comparison:
    """Rows with what their stopwatch should have shown, and whether it fell in the 90 % interval."""

    rows: GemmRows
    shown: FloatArray
    inside: BoolArray

    @property
    def mean_error_percent(self) -> float:
        """Mean absolute error, percent of what was measured."""
        return 100.0 * float(np.mean(np.abs(self.shown / self.rows.seconds - 1.0)))


def compare(model: GemmModel, rows: GemmRows, stopwatch_us: Mapping[str, Sequence[float]]) -> Comparison:
    """Predicts device times and shows them through each machine's stopwatch."""
    seconds, sigma = np.zeros(len(rows)), np.zeros(len(rows))
    for i, device in enumerate(rows.devices):
        mine = np.flatnonzero(rows.device == i)
        if len(mine):
            estimate = model.predict(rows.calls.take(mine), device)
            seconds[mine], sigma[mine] = estimate.seconds, estimate.sigma
    floor, offset = np.zeros(len(rows)), np.zeros(len(rows))
    for machine in np.unique(rows.machine):
        mine = rows.machine == machine
        floor[mine], offset[mine] = _reading(str(machine), rows.seconds[mine], stopwatch_us)
    reach = np.exp(Z90 * sigma)
    low, shown, high = (as_timed(t, floor, offset) for t in (seconds / reach, seconds, seconds * reach))
    slack = _HOST_NOISE * floor
    return Comparison(rows, shown, (rows.seconds >= low - slack) & (rows.seconds <= high + slack))


def _reading(machine: str, seconds: FloatArray, stopwatch_us: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    if machine.startswith("aic/"):
        return 1e-9, 1e-9
    if machine in stopwatch_us:
        floor, offset = stopwatch_us[machine]
        return max(1e-6 * floor, 1e-9), max(1e-6 * offset, 1e-9)
    floor = float(np.quantile(seconds, _UNFITTED_FLOOR))
    return floor, _UNFITTED_OFFSET * floor
