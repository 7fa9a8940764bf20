"""Fits the memory system that all streaming kernels share, from element-wise measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.model import Measurements, save_state
from traincast.kernels.record import Progress
from traincast.kernels.solve import relative_fit, spread_90
from traincast.kernels.streaming.memory import START_SECONDS
from traincast.kernels.streaming.model import ElementwiseModel
from traincast.kernels.streaming.parameters import with_spread
from traincast.kernels.streaming.vectors import SOURCE, VectorRows, read_vectors
from traincast.measurements.tables import UNJUDGED_SPREAD, held_out, only_present
from traincast.quantiles import Z90


def with_offsets(rows: VectorRows, seen: BoolArray) -> VectorRows:
    """Rows with the host's offset of every (device, op), from the `seen` rows far larger than the L2.

    There the time is offset + start + bytes / rate, linear in all unknowns. `pow` may be bound by arithmetic, so it
    takes the median difference between floor and offset of the device's other ops.
    """
    calls = rows.calls()
    read, written = calls["bytes_read"], calls["bytes_written"]
    offset = np.zeros(len(rows.op))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        use = mine & seen & rows.above & ~calls.is_kind("pow") & (read + written > 1.5 * device.l2_bytes)
        if not (use & (rows.floor > 0)).any():
            continue
        ops = np.unique(rows.op[use])
        columns = [(rows.op[use] == op) * 1e-5 for op in ops] + [read[use] / 1e12, written[use] / 1e12]
        fitted = relative_fit(np.stack(columns, axis=1).astype(np.float64), rows.seconds[use], knee=0.02)
        gaps = []
        for op, value in zip(ops, fitted, strict=False):
            group = mine & (rows.op == op)
            offset[group] = max(0.0, 1e-5 * float(value) - START_SECONDS)
            gaps.append(float(rows.floor[group][0]) - float(offset[group][0]))
        others = mine & ~np.isin(rows.op, ops)
        offset[others] = np.maximum(rows.floor[others] - float(np.median(gaps)), 0.0)
    return replace(rows, offset=offset)


def fit_model(rows: VectorRows, seen: BoolArray) -> ElementwiseModel:
    """The model from the `seen` rows above the floor (offsets already set)."""
    chosen = rows.take(seen & rows.above)
    devices, device = only_present(rows.devices, chosen.device)
    data = Measurements(
        chosen.calls(),
        devices,
        device,
        chosen.device_seconds,
    )
    return ElementwiseModel().fit(data)


def predict_rows(model: ElementwiseModel, rows: VectorRows) -> tuple[FloatArray, FloatArray]:
    """Device seconds and log-sigma of every row."""
    seconds, sigma = np.zeros(len(rows.op)), np.zeros(len(rows.op))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        if mine.any():
            estimate = model.predict(rows.take(mine).calls(), device)
            seconds[mine], sigma[mine] = estimate.seconds, estimate.sigma
    return seconds, sigma


def calibrated(rows: VectorRows, seen: BoolArray) -> ElementwiseModel:
    """The model of the `seen` rows, with spreads from a fifth of them that a second fit leaves out."""
    model = fit_model(rows, seen)
    left_out = seen & held_out(rows.cols, rows.rows)  # another fifth: the hash depends on the order
    trial = fit_model(rows, seen & ~left_out)
    seconds, _ = predict_rows(trial, rows)
    shown = rows.as_measured(seconds)
    assert model.parameters_ is not None
    keys = model.parameters_.chips.keys
    sigma = np.array([
        spread_90(shown[use], rows.seconds[use])
        for key in keys
        for use in [left_out & rows.above & (rows.device == [d.key for d in rows.devices].index(key))]
    ])  # fmt: skip
    model.parameters_ = with_spread(model.parameters_, np.maximum(sigma, 0.005), unseen_spread(rows, seen))
    return model


def unseen_spread(rows: VectorRows, seen: BoolArray) -> float:
    """Log-sigma for devices never measured: every device is predicted from the others, as the sheet describes it."""
    worst = []
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        elsewhere = seen & rows.above & ~_same_chip(rows, index)
        if not elsewhere.any():
            continue
        others = fit_model(rows, elsewhere)
        estimate = others.predict(rows.take(mine & seen & rows.above).calls(), device)
        shown = rows.take(mine & seen & rows.above)
        worst.append(float(np.median(np.abs(np.log(shown.as_measured(estimate.seconds) / shown.seconds)))))
    # a share of a handful of devices: the largest error among them is the honest 90 % point
    return max(worst) / Z90 if worst else UNJUDGED_SPREAD


def _same_chip(rows: VectorRows, index: int) -> BoolArray:
    me = rows.devices[index]
    twins = [i for i, d in enumerate(rows.devices) if (d.arch, d.num_sms) == (me.arch, me.num_sms)]
    return np.isin(rows.device, twins)


def fit_elementwise(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `elementwise.npz` and `.json`: the state of all streaming families. Returns the provenance."""
    progress("reading element-wise measurements", 0.0)
    rows = read_vectors(data, "elementwise")
    seen = ~rows.held_out
    rows = with_offsets(rows, seen)
    progress("fitting the memory system", 0.3)
    model = calibrated(rows, seen)
    assert model.parameters_ is not None
    used = seen & rows.above
    held = rows.held_out & rows.above
    seconds, sigma = predict_rows(model, rows)
    shown = rows.as_measured(seconds)
    inside = np.abs(np.log(shown[held] / rows.seconds[held])) <= Z90 * sigma[held]
    provenance = {
        "sources": [SOURCE],
        "files": ["kernels/vector_fp32.parquet", "kernels/vector_amd.parquet"],
        "rows_fitted": int(used.sum()),
        "rows_held_out": int(held.sum()),
        "mean_error_percent_fitted": 100 * float(np.mean(np.abs(shown[used] / rows.seconds[used] - 1))),
        "mean_error_percent_held_out": 100 * float(np.mean(np.abs(shown[held] / rows.seconds[held] - 1))),
        "interval_coverage_held_out": float(np.mean(inside)),
        "devices": list(model.parameters_.chips.keys),
        "families": ["elementwise", "copy", "index", "reduction", "pool", "memcpy"],
        "seed": "shape hash, see traincast.fitting.measurements.held_out",
    }
    save_state(model.state(), provenance, out / "elementwise")
    progress("element-wise done", 1.0)
    return provenance
