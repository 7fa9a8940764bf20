"""Fits the GEMM model from the public tables, every shape of the held-out fifth left aside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from traincast.costs.kernels.gemm.blackwell import with_blackwell
from traincast.costs.kernels.gemm.comparison import compare
from traincast.costs.kernels.gemm.measured import BLACKWELL_FILE, FILES, SOURCES, GemmSamples, read_gemm, together
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.costs.kernels.gemm.stopwatch import Stopwatch
from traincast.costs.kernels.model import save_state
from traincast.costs.kernels.record import Progress
from traincast.costs.kernels.training import SEED
from traincast.utils.arrays import BoolArray, FloatArray

_FLOOR_SHARE = 0.02  # of a machine's measurements: tiny products, where only the host shows
_EVENT_OFFSET = 0.5  # of the floor: a first guess at what events add to a long kernel
_LOOP_OFFSET = 0.1  # of the floor: launches queue up behind each other in a loop
_LINEAR_WEIGHT = 1.5  # NeuSight has a third as many linear layers as batched products
_DEEPBENCH_WEIGHT = 5.0  # 134 shapes per device, against thousands
_DEEPBENCH_HALF_WEIGHT = 20.0  # all there is for Volta's and Turing's tensor cores


def fit_gemm(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `gemm.npz` and `.json` under `out`, and returns the provenance."""
    progress("reading GEMM measurements", 0.0)
    tables = [read_gemm(data, file) for file in FILES]
    parts = [table.take(fittable(table)) for table in tables]
    names, watch = stopwatch(parts)
    model = GemmModel().fit(together(parts), watch, progress)
    fitted = model.stopwatch_
    later = read_gemm(data, BLACKWELL_FILE)
    model = with_blackwell(model, later, progress)
    stopwatch_us = {
        name: [round(1e6 * float(floor), 3), round(1e6 * float(offset), 3)]
        for name, floor, offset in zip(names, fitted.floor, fitted.offset, strict=True)
    }
    provenance = provenance_of(model, [*tables, later], stopwatch_us)
    save_state(model.state(), provenance, out / "gemm")
    progress("GEMM done", 1.0)
    return provenance


def provenance_of(
    model: GemmModel, tables: Sequence[GemmSamples], stopwatch_us: dict[str, list[float]]
) -> dict[str, Any]:
    """Where the model came from, and its mean absolute errors on rows it was fitted to and on the held-out fifth."""
    files: dict[str, Any] = {}
    for file, table in zip((*FILES, BLACKWELL_FILE), tables, strict=True):
        seen = fittable(table)
        fitted, held = (compare(model, table.take(use), stopwatch_us) for use in (seen, table.held_out & ~table.test))
        if not len(held.samples):  # the AMD table is all test split, of which the hash holds out a fifth
            held = compare(model, table.take(~seen), stopwatch_us)
        files[f"kernels/{file}.parquet"] = {
            "rows_fitted": len(fitted.samples),
            "rows_held_out": len(held.samples),
            "mean_error_percent_fitted": round(fitted.mean_error_percent, 3),
            "mean_error_percent_held_out": round(held.mean_error_percent, 3),
        }
    return {
        "sources": [SOURCES[name] for name in ("neusight", "aic", "deepbench")],
        "files": files,
        "devices": {name: list(fit.chips.keys) for name, fit in model.engines_.items()},
        "seed": f"networks: from 0; held-out shapes: {SEED.removeprefix('shape ')}",
        "stopwatch_us": stopwatch_us,
    }


def fittable(samples: GemmSamples) -> BoolArray:
    """Samples a fit may see: none of the held-out fifth, nor of NeuSight's test split where it has a train split."""
    has_train = np.array([bool((~samples.test[samples.device == i]).any()) for i in range(len(samples.devices))])
    nvidia = np.array([device.vendor == "nvidia" for device in samples.devices])
    set_apart = samples.test & (has_train | nvidia)[samples.device]
    return np.asarray(~(samples.held_out | set_apart))


def stopwatch(parts: Sequence[GemmSamples]) -> tuple[list[str], Stopwatch]:
    """The machines, and a first guess at their floors and offsets; graph-replayed kernels are timed alone."""
    machine = np.concatenate([part.machine for part in parts])
    seconds = np.concatenate([part.seconds for part in parts])
    names, group = np.unique(machine, return_inverse=True)
    floor: FloatArray = np.array([np.quantile(seconds[group == i], _FLOOR_SHARE) for i in range(len(names))])
    alone = np.array([name.startswith("aic/") for name in names])
    loop = np.array([name.startswith("deepbench/") for name in names])
    offset = floor * np.where(loop, _LOOP_OFFSET, _EVENT_OFFSET)
    weight = np.concatenate([_weight(part) for part in parts])
    floor, offset = np.where(alone, 0.0, floor), np.where(alone, 0.0, offset)
    return [str(name) for name in names], Stopwatch(group.astype(np.int64), floor, offset, weight)


def _weight(part: GemmSamples) -> FloatArray:
    if part.source != "deepbench":
        return np.where(part.calls.is_kind("linear"), _LINEAR_WEIGHT, 1.0)
    return np.where(part.calls.is_compute("fp32"), _DEEPBENCH_WEIGHT, _DEEPBENCH_HALF_WEIGHT)
