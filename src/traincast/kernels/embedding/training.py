"""Fits the rates of embedding kernels from those of the DLRM studies and of two jobs with FBGEMM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.embedding.measured import (
    STUDY_FILE,
    TRACES_FILE,
    EmbeddingRows,
    empty_block_cycles,
    read_embedding,
)
from traincast.kernels.embedding.model import EmbeddingModel, spread_group
from traincast.kernels.embedding.parameters import SPREAD_GROUPS
from traincast.kernels.embedding.traffic import Rates
from traincast.kernels.model import save_state
from traincast.kernels.record import Progress
from traincast.kernels.solve import spread_90
from traincast.measurements.tables import UNJUDGED_SPREAD
from traincast.quantiles import Z90

SOURCES = (
    "owensgroup/ml_perf_model @ 5b2522a0 (BSD-3-Clause)",
    "facebookresearch/param @ 1e115ffc (MIT)",
    "facebookresearch/HolisticTraceAnalysis @ f4d0062c (MIT)",
)
LEAST_SECONDS = 50e-6


def predict_rows(model: EmbeddingModel, rows: EmbeddingRows) -> FloatArray:
    """Seconds of every row."""
    seconds = np.zeros(len(rows.seconds))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        if mine.any():
            seconds[mine] = model.predict(rows.calls.take(mine), device).seconds
    return seconds


def spreads(rows: EmbeddingRows, seconds: FloatArray, use: BoolArray) -> FloatArray:
    """Log-sigma of each group of kernels from the rows to use; that of a chip never judged where there are none."""
    group = spread_group(rows.calls, seconds)
    chosen = [use & (group == index) for index in range(len(SPREAD_GROUPS))]
    return np.array([spread_90(seconds[own], rows.seconds[own]) if own.any() else UNJUDGED_SPREAD for own in chosen])


def judged_spreads(rows: EmbeddingRows, seconds: FloatArray) -> FloatArray:
    """The log-sigma of every held-out row as other shapes tell it, so that no interval is judged by a row that set
    it; not a number for fitted rows, and where its group has no other held-out shape."""
    group = spread_group(rows.calls, seconds)
    sigma = np.full(len(seconds), np.nan)
    for shape in np.unique(rows.shape[rows.held_out].astype(str)):
        mine = rows.held_out & (rows.shape == shape)
        others = rows.held_out & ~mine
        known = np.array([bool((others & (group == index)).any()) for index in range(len(SPREAD_GROUPS))])
        sigma[mine] = np.where(known, spreads(rows, seconds, others), np.nan)[group[mine]]
    return sigma


def fit_embedding(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `embedding.npz` and `.json`, and returns the provenance."""
    progress("fitting embedding", 0.0)
    rows = read_embedding(data)
    start = Rates(empty_block_cycles=empty_block_cycles(data))
    model = EmbeddingModel(start=start).fit(rows.take(~rows.held_out).measurements())
    seconds, held = predict_rows(model, rows), rows.held_out
    model = model.with_spread(spreads(rows, seconds, held), UNJUDGED_SPREAD, rows.measurements())
    error, sigma = np.abs(seconds / rows.seconds - 1), judged_spreads(rows, seconds)
    judged = ~np.isnan(sigma)
    inside = np.abs(np.log(seconds / rows.seconds))[judged] <= Z90 * sigma[judged]
    long = rows.seconds >= LEAST_SECONDS
    provenance = {
        "sources": list(SOURCES),
        "files": [STUDY_FILE, TRACES_FILE],
        "rows_fitted": int((~held).sum()),
        "rows_held_out": int(held.sum()),
        "rows_held_out_above_50_us": int((held & long).sum()),
        "mean_error_percent_fitted": 100 * float(np.mean(error[~held])),
        "mean_error_percent_held_out": 100 * float(np.mean(error[held])),
        "mean_error_percent_held_out_above_50_us": 100 * float(np.mean(error[held & long])),
        "interval_coverage_held_out": float(np.mean(inside)),
        "interval_coverage_rows": int(judged.sum()),
        "devices": sorted({device.key for device in rows.devices}),
        "seed": "none: rows are set apart by shape, rank and step, see traincast.kernels.embedding.measured",
    }
    save_state(model.state(), provenance, out / "embedding")
    progress("embedding done", 1.0)
    return provenance
