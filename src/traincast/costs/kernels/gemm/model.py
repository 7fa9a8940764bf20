"""Matrix products: physics of tiles and traffic, corrected by one small network per kind of arithmetic unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.call import COMPUTE_TYPES, Calls, Estimate, Family
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.gemm.engine import ENGINES, engine_of
from traincast.costs.kernels.gemm.parameters import SIGMA_EDGES, EngineFit, clock_spread, engine_seconds, spread_class
from traincast.costs.kernels.gemm.stopwatch import Stopwatch
from traincast.costs.kernels.gemm.variants import combined, plain
from traincast.costs.kernels.model import KernelModel, Measurements, State
from traincast.costs.kernels.record import Progress, silent
from traincast.hardware.device import Device
from traincast.utils.arrays import BoolArray, FloatArray

_CHUNK = 4096  # calls at once: features stay in the CPU's cache
_BEYOND = 0.1  # log-sigma for every doubling outside the measured sizes
_BORROWED = 0.2  # log-sigma where a batch or a compute type borrows the correction of another
_SESSION = 0.04  # log-sigma of one card between two runs: drivers, temperature; see docs/evidence/kernels.md
_FITTED_TYPES = {
    "simt": ("fp32",), "half": ("bf16", "fp16"), "fp8": ("fp8",), "fp8_block": ("fp8_block",), "fp8_graphics": ("fp8",),
    "fp4": ("fp4",), "amd": ("fp32",),
}  # fmt: skip


class GemmModel(KernelModel):
    """GEMM, linear and batched GEMM in every compute type. Fitted state: `engines_`, by engine name."""

    family: ClassVar[Family] = GEMM

    def __init__(self, engines: Mapping[str, EngineFit] | None = None) -> None:
        self.engines_ = dict(engines or {})
        self.stopwatch_ = Stopwatch.none(0)

    def fit(self, data: Measurements, watch: Stopwatch | None = None, progress: Progress = silent) -> Self:
        """Learns from times as `watch` shows them, device times without one, and keeps that stopwatch as fitted beside
        the engines (`stopwatch_`). Engines without measurements stay as they are."""
        from traincast.costs.kernels.gemm.fitting import fit_engines

        fits, self.stopwatch_ = fit_engines(data, watch or Stopwatch.none(len(data.seconds)), progress)
        self.engines_.update(fits)
        return self

    def state(self) -> State:
        """All engines as named arrays."""
        return {key: value for name, fit in self.engines_.items() for key, value in fit.state(name).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The model with this fitted state."""
        return cls({name: EngineFit.from_state(state, name) for name in ENGINES if f"{name}_sigma" in state})

    def predict(self, calls: Calls, device: Device) -> Estimate:
        """Device time of every call."""
        return combined(calls, self._predict_products(plain(calls), device), device)

    def _predict_products(self, calls: Calls, device: Device) -> Estimate:
        whole = Estimate.zeros(len(calls))
        for code in np.unique(calls.compute):
            compute = COMPUTE_TYPES[code]
            rows = np.flatnonzero(calls.compute == code)
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                whole.put(chunk, self._predict_chunk(calls.take(chunk), device, compute))
        return whole

    def _predict_chunk(self, calls: Calls, device: Device, compute: str) -> Estimate:
        engine = engine_of(device, compute)
        fit = self.engines_[engine.name]
        row = fit.chips.find(device)
        seconds = engine_seconds(engine, fit, calls, device, compute)
        stacked = engine.linear_only & (calls["batch"] > 1.0)
        factors = _factors_outside(fit.box, calls, stacked)
        beyond = np.log2(factors).sum(axis=1)
        spreads = fit.sigma[row] if row >= 0 else fit.unseen_sigma(device)
        spread = np.hypot(spreads[spread_class(calls), np.searchsorted(SIGMA_EDGES, seconds)], clock_spread(device))
        borrowed = stacked | (compute not in _FITTED_TYPES[engine.name])
        sigma = np.hypot(np.hypot(spread, np.where(borrowed, _BORROWED, _SESSION)), _BEYOND * beyond)
        new_gpu = np.full(len(calls), row < 0)
        return Estimate(seconds, sigma, (beyond == 0.0) & ~new_gpu & ~borrowed, factors.max(axis=1), new_gpu)


def _factors_outside(box: FloatArray, calls: Calls, stacked: BoolArray) -> FloatArray:
    """How many times each dimension of a call lies outside the measured sizes; 1 inside."""
    sizes = np.maximum(calls.values[:, :4], 1.0)
    sizes[:, 1] *= np.where(stacked, sizes[:, 0], 1.0)
    sizes[stacked, 0] = 1.0
    batched = (sizes[:, 0] > 1.0).astype(np.int64)
    return np.asarray(np.maximum(np.maximum(sizes / box[batched, 1], box[batched, 0] / sizes), 1.0))
