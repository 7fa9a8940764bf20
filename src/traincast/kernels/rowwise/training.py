"""Fits softmax and layer norm from the NeuSight vector measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.model import Measurements, save_state
from traincast.kernels.record import Progress
from traincast.kernels.rowwise.features import Features, layer_norm_features, softmax_features
from traincast.kernels.rowwise.fitting import fit_rows
from traincast.kernels.rowwise.model import NormModel, SoftmaxModel
from traincast.kernels.rowwise.parameters import RowParameters
from traincast.kernels.solve import relative_fit, spread_90
from traincast.kernels.streaming.memory import START_SECONDS
from traincast.kernels.streaming.training import fit_model, with_offsets
from traincast.kernels.streaming.vectors import FILES, SOURCE, VectorRows, read_vectors
from traincast.measurements.tables import UNJUDGED_SPREAD, held_out, only_present
from traincast.quantiles import Z90

_FEATURES: dict[str, tuple[Features, float]] = {"softmax": (softmax_features, 3.0), "ln": (layer_norm_features, 2.0)}
_LONGEST_HIDDEN = 30e-6  # the host is at most this far ahead of the kernel's start when it records the second event


def with_row_offsets(rows: VectorRows, seen: BoolArray) -> VectorRows:
    """Rows with the host's offset of every device: the constant that the features leave over."""
    features = _FEATURES[str(rows.op[0])][0]
    offset = np.zeros(len(rows.op))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        use = mine & seen & rows.above
        if not (use & (rows.floor > 0)).any():
            continue
        item = np.full(int(use.sum()), 4.0)
        matrix = features(device, rows.rows[use], rows.cols[use], item)
        matrix = np.concatenate([np.full((len(matrix), 1), 1e-5), matrix], axis=1)
        constant = 1e-5 * relative_fit(matrix, rows.seconds[use])[0] - START_SECONDS
        floor = float(rows.floor[mine].max())
        offset[mine] = np.clip(constant, max(floor - _LONGEST_HIDDEN, 0.0), floor)
    return replace(rows, offset=offset)


def fit_parameters(rows: VectorRows, seen: BoolArray) -> RowParameters:
    """Parameters from the `seen` rows above the floor (offsets already set)."""
    features, passes = _FEATURES[str(rows.op[0])]
    chosen = rows.take(seen & rows.above)
    devices, device = only_present(rows.devices, chosen.device)
    return fit_rows(Measurements(chosen.calls(), devices, device, chosen.device_seconds), features, passes)


def predict_rows(parameters: RowParameters, rows: VectorRows) -> tuple[FloatArray, FloatArray]:
    """Device seconds and log-sigma of every row."""
    features = _FEATURES[str(rows.op[0])][0]
    seconds, sigma = np.zeros(len(rows.op)), np.zeros(len(rows.op))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        if mine.any():
            item = np.full(int(mine.sum()), 4.0)
            seconds[mine], _, sigma[mine] = parameters.seconds(features, device, rows.rows[mine], rows.cols[mine], item)
    return seconds, sigma


def calibrated(rows: VectorRows, seen: BoolArray) -> RowParameters:
    """Parameters of the `seen` rows, with spreads from a fifth of them that a second fit leaves out."""
    parameters = fit_parameters(rows, seen)
    left_out = seen & held_out(rows.cols, rows.rows)
    trial, _ = predict_rows(fit_parameters(rows, seen & ~left_out), rows)
    shown = rows.as_measured(trial)
    keys = [device.key for device in rows.devices]
    sigma = []
    for key in parameters.chips.keys:
        use = left_out & rows.above & (rows.device == keys.index(key))
        sigma.append(max(spread_90(shown[use], rows.seconds[use]), 0.01))
    return parameters.with_spread(np.array(sigma), unseen_spread(rows, seen))


def unseen_spread(rows: VectorRows, seen: BoolArray) -> float:
    """Log-sigma for devices never measured: each device predicted from those with another chip, all rows pooled."""
    shown, measured = [], []
    for index, device in enumerate(rows.devices):
        twins = [i for i, d in enumerate(rows.devices) if (d.arch, d.num_sms) == (device.arch, device.num_sms)]
        elsewhere = seen & rows.above & ~np.isin(rows.device, twins)
        if not elsewhere.any():
            continue
        others = fit_parameters(rows, elsewhere)
        mine = rows.take(seen & rows.above & (rows.device == index))
        seconds, _ = predict_rows(others, mine)
        keep = slice(None, None, max(1, len(seconds) // 200))  # every device counts alike
        shown.append(mine.as_measured(seconds)[keep])
        measured.append(mine.seconds[keep])
    return spread_90(np.concatenate(shown), np.concatenate(measured)) if shown else UNJUDGED_SPREAD


def _provenance(parameters: RowParameters, rows: VectorRows) -> dict[str, Any]:
    seconds, sigma = predict_rows(parameters, rows)
    shown = rows.as_measured(seconds)
    used, held = ~rows.held_out & rows.above, rows.held_out & rows.above
    inside = np.abs(np.log(shown[held] / rows.seconds[held])) <= Z90 * sigma[held]
    return {
        "sources": [SOURCE],
        "files": list(FILES),
        "rows_fitted": int(used.sum()),
        "rows_held_out": int(held.sum()),
        "mean_error_percent_fitted": 100 * float(np.mean(np.abs(shown[used] / rows.seconds[used] - 1))),
        "mean_error_percent_held_out": 100 * float(np.mean(np.abs(shown[held] / rows.seconds[held] - 1))),
        "interval_coverage_held_out": float(np.mean(inside)),
        "devices": list(parameters.chips.keys),
        "seed": "shape hash, see traincast.fitting.measurements.held_out",
    }


def fit_softmax(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `softmax.npz` and `.json`, and returns the provenance."""
    progress("fitting softmax", 0.0)
    rows = read_vectors(data, "softmax")
    rows = with_row_offsets(rows, ~rows.held_out)
    parameters = calibrated(rows, ~rows.held_out)
    provenance = _provenance(parameters, rows)
    save_state(SoftmaxModel(parameters).state(), provenance, out / "softmax")
    progress("softmax done", 1.0)
    return provenance


def fit_norm(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `norm.npz` and `.json`: layer norm, and the memory system for batch norm. Returns the provenance."""
    progress("fitting layer norm", 0.0)
    rows = read_vectors(data, "ln")
    rows = with_row_offsets(rows, ~rows.held_out)
    parameters = calibrated(rows, ~rows.held_out)
    vectors = read_vectors(data, "elementwise")
    streams = fit_model(with_offsets(vectors, ~vectors.held_out), ~vectors.held_out).parameters_
    provenance = _provenance(parameters, rows)
    save_state(NormModel(parameters, streams).state(), provenance, out / "norm")
    progress("norm done", 1.0)
    return provenance
