"""GEMM predictions beside measurements, read through the stopwatch of the machine that measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traincast.costs.kernels.gemm.measured import GemmSamples
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.costs.kernels.gemm.stopwatch import as_timed
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.metrics import mean_error_percent
from traincast.utils.quantiles import Z90

_UNFITTED_FLOOR = 0.003  # quantile of a machine's own readings that stands for its host
_HOST_NOISE = 0.05  # readings near a floor scatter with the host, not with the kernel
_UNFITTED_OFFSET = 0.5  # of the floor: what the fitted machines show


@dataclass(frozen=True, eq=False, slots=True)
class Comparison:
    """Samples with what their stopwatch should have shown, and whether it fell in the 90 % interval."""

    samples: GemmSamples
    shown: FloatArray
    inside: BoolArray

    @property
    def mean_error_percent(self) -> float:
        """Mean absolute error, percent of what was measured."""
        return mean_error_percent(self.shown, self.samples.seconds)


def compare(model: GemmModel, samples: GemmSamples, stopwatch_us: Mapping[str, Sequence[float]]) -> Comparison:
    """Predicts device times and shows them through each machine's stopwatch."""
    seconds, sigma = samples.kernel_seconds(model.predict)
    floor, offset = np.zeros(len(samples)), np.zeros(len(samples))
    for machine in np.unique(samples.machine):
        mine = samples.machine == machine
        floor[mine], offset[mine] = _reading(str(machine), samples.seconds[mine], stopwatch_us)
    reach = np.exp(Z90 * sigma)
    low, shown, high = (as_timed(t, floor, offset) for t in (seconds / reach, seconds, seconds * reach))
    slack = _HOST_NOISE * floor
    return Comparison(samples, shown, (samples.seconds >= low - slack) & (samples.seconds <= high + slack))


def _reading(machine: str, seconds: FloatArray, stopwatch_us: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    if machine.startswith("aic/"):
        return 1e-9, 1e-9
    if machine in stopwatch_us:
        floor, offset = stopwatch_us[machine]
        return max(1e-6 * floor, 1e-9), max(1e-6 * offset, 1e-9)
    floor = float(np.quantile(seconds, _UNFITTED_FLOOR))
    return floor, _UNFITTED_OFFSET * floor
