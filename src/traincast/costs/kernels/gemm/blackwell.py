"""The Blackwell table on top of a fitted model: codes for its devices, networks for its types. The rest stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traincast.costs.kernels.call import COMPUTE_TYPES
from traincast.costs.kernels.chips import Chips
from traincast.costs.kernels.gemm.engine import ENGINES, engine_of
from traincast.costs.kernels.gemm.extension import with_device
from traincast.costs.kernels.gemm.fitting import fit_engines
from traincast.costs.kernels.gemm.measured import GemmSamples
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.costs.kernels.gemm.stopwatch import Stopwatch
from traincast.costs.kernels.model import Measurements
from traincast.costs.kernels.record import Progress, silent
from traincast.utils.arrays import BoolArray

EXTENDED = ("half", "fp8")
"""Engines whose networks were trained before, on other devices."""
TRAINED = ("fp8_block", "fp8_graphics", "fp4")
"""Engines that only this table has."""
_SAMPLE = 6  # of the table, one shape in so many trains the networks: about 19,000 measurements of each type


def with_blackwell(model: GemmModel, samples: GemmSamples, progress: Progress = silent) -> GemmModel:
    """The model with what the samples that are not held out teach. Deterministic."""
    seen = samples.take(~samples.held_out)
    engines = dict(model.engines_)
    for name in EXTENDED:
        for index, device in enumerate(seen.devices):
            mine = (seen.device == index) & engine_rows(seen, name)
            if mine.any():
                progress(f"GEMM on {name} units of {device.key}", 0.2)
                part = seen.take(mine)
                engines[name] = with_device(engines[name], ENGINES[name], part.calls, part.seconds, device)
    chosen = np.isin(np.arange(len(seen)) % _SAMPLE, [0]) & engine_rows(seen, *TRAINED)
    part = seen.take(chosen)
    data = Measurements(part.calls, part.devices, part.device, part.seconds)
    fits, _ = fit_engines(data, Stopwatch.none(len(part)), progress)
    return GemmModel({**engines, **fits})


def without_later_devices(model: GemmModel) -> GemmModel:
    """The model without the codes that were added: devices of the table as if their sheets were all there is."""
    engines = {}
    for name, fit in model.engines_.items():
        known, count = fit.chips, fit.trained
        chips = Chips(known.keys[:count], known.archs[:count], known.numbers[:count])
        sigma = np.concatenate([fit.sigma[:count], fit.sigma[-2:]])
        engines[name] = replace(fit, chips=chips, sigma=sigma, ceiling=fit.ceiling[:count])
    return GemmModel(engines)


def engine_rows(samples: GemmSamples, *names: str) -> BoolArray:
    """Which samples run on one of these engines."""
    table = np.array([[engine_of(d, c).name in names for c in COMPUTE_TYPES] for d in samples.devices])
    return np.asarray(table[samples.device, samples.calls.compute])
