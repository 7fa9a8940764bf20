"""Fits convolutions from NeuSight (3x3, fp32, forward) and DeepBench (all directions, fp32 and fp16)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.fit.measurements import (
    UNJUDGED_SPREAD,
    Table,
    check_possible,
    device_rows,
    devices_in,
    held_out,
    only_present,
    read_table,
)
from traincast.kernels.call import BoolArray, Calls, FloatArray
from traincast.kernels.families import CONV
from traincast.kernels.models.base import Measurements, save_state
from traincast.kernels.models.conv import ConvModel
from traincast.kernels.models.conv_fit import fit_weights
from traincast.kernels.models.solve import spread_90
from traincast.platform import Device

Progress = Callable[[str, float], None]
NEUSIGHT_FILE = "kernels/conv_fp32.parquet"
DEEPBENCH_FILE = "kernels/deepbench.parquet"
SOURCES = ["sitar-lab/NeuSight @ 6945927d (MIT)", "baidu-research/DeepBench @ da81ba78 (Apache-2.0)"]
_KINDS = {
    "conv_forward": "forward", "conv_backward_data": "backward_data", "conv_backward_weights": "backward_weights",
}  # fmt: skip
_COMPUTE = {"fp32": "fp32", "fp16_tensor_core": "fp16"}
# DeepBench queues its calls, so nothing of the host shows; NeuSight times one call between events, in which the
# workspace is allocated: equal shapes differ by up to 150 us
_WORKSPACE_SECONDS = 30e-6
_EVENT_NOISE_SECONDS = 60e-6
_QUEUE_NOISE_SECONDS = 2e-6
_ENOUGH_ROWS = 100


@dataclass(frozen=True, eq=False, slots=True)
class ConvRows:
    """Measured convolutions. `seconds` is as measured, `offset` the host's part of it."""

    devices: tuple[Device, ...]
    device: npt.NDArray[np.int64]
    calls: Calls
    seconds: FloatArray
    event_timed: BoolArray
    held_out: BoolArray
    offset: FloatArray

    def take(self, chosen: BoolArray) -> ConvRows:
        """A selection, with every device kept in the list."""
        names = ("device", "seconds", "event_timed", "held_out", "offset")
        return replace(self, calls=self.calls.take(chosen), **{name: getattr(self, name)[chosen] for name in names})

    def measurements(self) -> Measurements:
        """As device times, with the devices that are left."""
        devices, device = only_present(self.devices, self.device)
        seconds = np.maximum(self.seconds - self.offset, 0.2 * self.seconds)
        noise = np.where(self.event_timed, _EVENT_NOISE_SECONDS, _QUEUE_NOISE_SECONDS)
        return Measurements(self.calls, devices, device, seconds, noise)


def read_convolutions(data: Path) -> ConvRows:
    """All rows of both sources, offsets still zero."""
    sizes = ("batch", "in_channels", "out_channels", "in_h", "in_w", "kernel_h", "kernel_w", "stride", "latency_us")
    wide = read_table(data, NEUSIGHT_FILE, ("device",), (*sizes, "padding"), positive=sizes)
    bench = _deepbench(data)
    devices = {d.key: d for table in (wide, bench) for d in devices_in(table)}
    ordered = tuple(devices[key] for key in sorted(devices))
    first = _columns(wide, stride=("stride", "stride"), pad=("padding", "padding"))
    second = _columns(bench, stride=("stride_h", "stride_w"), pad=("pad_h", "pad_w"))
    values = np.concatenate([first, second])
    kinds = ["forward"] * len(wide) + [_KINDS[op] for op in bench.text("op")]
    computes = ["fp32"] * len(wide) + [_COMPUTE[name] for name in bench.text("precision")]
    calls = Calls.from_columns(CONV, kinds, computes, values)
    seconds = 1e-6 * np.concatenate([wide.number("latency_us"), bench.number("latency_us")])
    device = np.concatenate([device_rows(wide, ordered), device_rows(bench, ordered)])
    timed = np.arange(len(seconds)) < len(wide)
    _check(wide, bench, ordered, calls)
    shape = [calls.values[:, i] for i in range(8)] + [calls.kind.astype(np.float64)]
    return ConvRows(ordered, device, calls, seconds, timed, held_out(*shape), np.zeros(len(seconds)))


def with_offsets(rows: ConvRows, seen: BoolArray) -> ConvRows:
    """Rows with the host's offset of every event-timed device: its floor, and what a workspace costs on top."""
    offset = rows.offset.copy()
    for index in range(len(rows.devices)):
        mine = (rows.device == index) & rows.event_timed
        if mine.any():
            offset[mine] = np.quantile(rows.seconds[mine & seen], 0.001) + _WORKSPACE_SECONDS
    return replace(rows, offset=offset)


def predict_rows(model: ConvModel, rows: ConvRows) -> tuple[FloatArray, FloatArray]:
    """Measured-like seconds (offset included) and log-sigma of every row."""
    seconds, sigma = np.zeros(len(rows.seconds)), np.zeros(len(rows.seconds))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        if mine.any():
            estimate = model.predict(rows.calls.take(mine), device)
            seconds[mine], sigma[mine] = rows.offset[mine] + estimate.seconds, estimate.sigma
    return seconds, sigma


def fit_conv(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `conv.npz` and `.json`, and returns the provenance."""
    progress("reading convolutions", 0.0)
    rows = read_convolutions(data)
    seen = ~rows.held_out
    rows = with_offsets(rows, seen)
    progress("fitting convolutions", 0.4)
    model = ConvModel().fit(rows.take(seen).measurements())
    assert model.parameters_ is not None
    again = seen & ~_calibration(rows)
    trial = ConvModel().fit(rows.take(again).measurements())
    sigma = [_spread(trial, rows, seen & ~again, key) for key in model.parameters_.chips.keys]
    progress("leaving devices out", 0.7)
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
    added = np.where(some.event_timed, 0.0, ConvModel._UNMEASURED)
    return max(spread_90(seconds, some.seconds, added), 0.05)


def _provenance(model: ConvModel, rows: ConvRows) -> dict[str, Any]:
    seconds, sigma = predict_rows(model, rows)
    error = np.abs(seconds / rows.seconds - 1)
    held, timed = rows.held_out, rows.event_timed
    inside = np.abs(np.log(seconds / rows.seconds)) <= 1.645 * sigma
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
            device.key: round(1e6 * float(rows.offset[(rows.device == i) & timed].max()), 1)
            for i, device in enumerate(rows.devices)
            if ((rows.device == i) & timed).any()
        },
        "devices": list(model.parameters_.chips.keys),
        "seed": "shape hash, see traincast.fit.measurements.held_out",
    }


def _deepbench(data: Path) -> Table:
    sizes = ("batch", "in_channels", "in_h", "in_w", "out_channels", "kernel_h", "kernel_w")
    table = read_table(
        data, DEEPBENCH_FILE, ("device", "op", "precision"),
        (*sizes, "pad_h", "pad_w", "stride_h", "stride_w", "latency_us"), positive=("latency_us",),
    )  # fmt: skip
    wanted = np.isin(table.text("op").astype(str), list(_KINDS))
    wanted &= np.isin(table.text("precision").astype(str), list(_COMPUTE))
    # nobody asks for the gradient of an image: such rows would only distort the fit
    wanted &= ~((table.text("op") == "conv_backward_data") & (table.number("in_channels") < 8))
    return table.take(np.asarray(wanted, dtype=np.bool_))


def _columns(table: Table, stride: tuple[str, str], pad: tuple[str, str]) -> FloatArray:
    names = ("batch", "in_channels", "out_channels", "in_h", "in_w", "kernel_h", "kernel_w", *stride, *pad)
    ones = np.ones(len(table))
    return np.stack([*(table.number(name) for name in names), ones, ones, ones], axis=1)


def _check(wide: Table, bench: Table, devices: tuple[Device, ...], calls: Calls) -> None:
    """Winograd does a quarter of the products at best; nothing explains more than that."""
    start = 0
    for table in (wide, bench):
        rows = np.arange(start, start + len(table))
        part = calls.take(rows)
        products = part["batch"] * part["in_channels"] * part["out_channels"] * part["kernel_h"] * part["kernel_w"]
        outputs = part["in_h"] / part["stride_h"] * (part["in_w"] / part["stride_w"])
        index = device_rows(table, devices)
        peak = np.array([max(d.peak_flops.values()) for d in devices])[index]
        check_possible(table, 2 * products * outputs / 4 / peak, 1e-6 * table.number("latency_us"))
        start += len(table)
