"""Fits convolutions from NeuSight (3x3, fp32, forward) and DeepBench (all directions, fp32 and fp16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from traincast.arrays import BoolArray, FloatArray
from traincast.kernels.conv.fitting import fit_weights
from traincast.kernels.conv.host_delay import with_host_parts
from traincast.kernels.conv.measured import DEEPBENCH_FILE, NEUSIGHT_FILE, ConvRows, read_convolutions
from traincast.kernels.conv.model import ConvModel
from traincast.kernels.model import save_state
from traincast.kernels.record import Progress
from traincast.kernels.solve import spread_90
from traincast.measurements.tables import UNJUDGED_SPREAD, held_out
from traincast.quantiles import Z90

SOURCES = ["sitar-lab/NeuSight @ 6945927d (MIT)", "baidu-research/DeepBench @ da81ba78 (Apache-2.0)"]
_ENOUGH_ROWS = 100


def predict_rows(model: ConvModel, rows: ConvRows) -> tuple[FloatArray, FloatArray]:
    """Measured-like seconds and log-sigma of every row, the host's part included in both."""
    seconds, sigma = np.zeros(len(rows.seconds)), np.zeros(len(rows.seconds))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        if mine.any():
            estimate = model.predict(rows.calls.take(mine), device)
            seconds[mine], sigma[mine] = rows.offset[mine] + estimate.seconds, estimate.sigma
    return seconds, np.hypot(sigma, rows.unsure / seconds)


def fit_conv(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `conv.npz` and `.json`, and returns the provenance."""
    progress("reading convolutions", 0.0)
    rows = read_convolutions(data)
    seen = ~rows.held_out
    progress("fitting convolutions", 0.1)
    again = seen & ~_calibration(rows)
    judged = with_host_parts(rows, again)
    trial = ConvModel().fit(judged.take(again).measurements())
    progress("fitting convolutions", 0.4)
    rows = with_host_parts(rows, seen)
    model = ConvModel().fit(rows.take(seen).measurements())
    assert model.parameters_ is not None
    sigma = [_spread(trial, judged, seen & ~again, key) for key in model.parameters_.chips.keys]
    progress("leaving devices out", 0.8)
    model.parameters_ = model.parameters_.with_spread(np.array(sigma), unseen_spread(rows, seen))
    provenance = _provenance(model, rows)
    save_state(model.state(), provenance, out / "conv")
    progress("convolutions done", 1.0)
    return provenance


def unseen_spread(rows: ConvRows, seen: BoolArray) -> float:
    """Log-sigma for devices never measured, from predicting each device without it."""
    shown, measured = [], []
    for index, device in enumerate(rows.devices):
        twins = [i for i, d in enumerate(rows.devices) if (d.arch, d.num_sms) == (device.arch, device.num_sms)]
        elsewhere = seen & ~np.isin(rows.device, twins)
        if not elsewhere.any():
            continue
        others = ConvModel(fit_weights(rows.take(elsewhere).measurements()))
        mine = rows.take(seen & (rows.device == index) & rows.calls.is_compute("fp32"))
        seconds, _ = predict_rows(others, mine)
        keep = slice(None, None, max(1, len(seconds) // 200))
        shown.append(seconds[keep])
        measured.append(mine.seconds[keep])
    return spread_90(np.concatenate(shown), np.concatenate(measured)) if shown else UNJUDGED_SPREAD


def _calibration(rows: ConvRows) -> BoolArray:
    return held_out(rows.calls["in_channels"], rows.calls["batch"], rows.calls["out_channels"], rows.calls["in_h"])


def _spread(trial: ConvModel, rows: ConvRows, chosen: BoolArray, key: str) -> float:
    """Log-sigma of a device; one with few rows to judge by shares that of all queue-timed devices."""
    index = [device.key for device in rows.devices].index(key)
    plain = chosen & rows.calls.is_compute("fp32")
    mine = plain & (rows.device == index)
    some = rows.take(mine if mine.sum() >= _ENOUGH_ROWS else plain & ~rows.event_timed)
    seconds, _ = predict_rows(trial, some)
    added = np.where(some.event_timed, some.unsure / seconds, ConvModel._UNMEASURED)
    return max(spread_90(seconds, some.seconds, added), 0.05)


def _provenance(model: ConvModel, rows: ConvRows) -> dict[str, Any]:
    seconds, sigma = predict_rows(model, rows)
    error = np.abs(seconds / rows.seconds - 1)
    held, timed = rows.held_out, rows.event_timed
    inside = np.abs(np.log(seconds / rows.seconds)) <= Z90 * sigma
    assert model.parameters_ is not None
    return {
        "sources": SOURCES,
        "files": [NEUSIGHT_FILE, DEEPBENCH_FILE],
        "rows_fitted": int((~held).sum()),
        "rows_held_out": int(held.sum()),
        "mean_error_percent_fitted": 100 * float(np.mean(error[~held])),
        "mean_error_percent_held_out_neusight": 100 * float(np.mean(error[held & timed])),
        "mean_error_percent_held_out_deepbench": 100 * float(np.mean(error[held & ~timed])),
        "interval_coverage_held_out": float(np.mean(inside[held])),
        "host_offset_us": {
            device.key: round(1e6 * float(rows.offset[held & timed & (rows.device == i)].mean()), 1)
            for i, device in enumerate(rows.devices)
            if (held & timed & (rows.device == i)).any()
        },
        "devices": list(model.parameters_.chips.keys),
        "seed": "shape hash, see traincast.fitting.measurements.held_out",
    }
