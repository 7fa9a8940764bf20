"""Measured convolutions: NeuSight (3x3, fp32, forward) and DeepBench (all directions, fp32 and fp16)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.conv import CONV
from traincast.hardware import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast_evaluation.kernels.samples import Samples
from traincast_evaluation.measured_tables import (
    MeasuredTable,
    check_positive,
    check_possible,
    list_devices,
    number_devices,
    read_table,
    select_held_out,
)

NEUSIGHT_FILE = "kernels/conv_fp32.parquet"
DEEPBENCH_FILE = "kernels/deepbench.parquet"
_KINDS = {
    "conv_forward": "forward", "conv_backward_data": "backward_data", "conv_backward_weights": "backward_weights",
}  # fmt: skip
_COMPUTE = {"fp32": "fp32", "fp16_tensor_core": "fp16"}
_NOISE_SECONDS = 2e-6  # of a stopwatch whose host part is known
_LEAST_DEVICE_SHARE = 0.1  # of a reading


@dataclass(frozen=True, eq=False, slots=True)
class ConvSamples(Samples):
    """Measured convolutions; `offset` seconds of a time are the host's part, known to `unsure` seconds.

    DeepBench queues its calls, so nothing of the host shows. NeuSight times one call between events (`event_timed`).
    """

    event_timed: BoolArray
    offset: FloatArray
    unsure: FloatArray

    @property
    def device_seconds(self) -> FloatArray:
        """Kernel time: what is left after the host's part."""
        return np.maximum(self.seconds - self.offset, _LEAST_DEVICE_SHARE * self.seconds)

    @property
    def noise_seconds(self) -> FloatArray:
        """Of the stopwatch, and of what is known of the host."""
        return np.hypot(_NOISE_SECONDS, self.unsure)

    def shown(self, seconds: FloatArray, sigma: FloatArray) -> tuple[FloatArray, FloatArray]:
        """With the host's part in both."""
        total = self.offset + seconds
        return total, np.hypot(sigma, self.unsure / total)

    def names(self) -> list[str]:
        """Batch, channels, filters, height, width and window."""
        return ["x".join(f"{value:.0f}" for value in values[:7]) for values in self.calls.values]


def read_convolutions(data: Path) -> ConvSamples:
    """All convolutions of both sources, host parts still zero."""
    sizes = ("batch", "in_channels", "out_channels", "in_h", "in_w", "kernel_h", "kernel_w", "stride", "latency_us")
    wide = read_table(data, NEUSIGHT_FILE, ("device",), (*sizes, "padding"), positive=sizes)
    bench = _deepbench(data)
    devices = {d.key: d for table in (wide, bench) for d in list_devices(table)}
    ordered = tuple(devices[key] for key in sorted(devices))
    first = _columns(wide, stride=("stride", "stride"), pad=("padding", "padding"))
    second = _columns(bench, stride=("stride_h", "stride_w"), pad=("pad_h", "pad_w"))
    values = np.concatenate([first, second])
    kinds = ["forward"] * len(wide) + [_KINDS[op] for op in bench.text("op")]
    computes = ["fp32"] * len(wide) + [_COMPUTE[name] for name in bench.text("precision")]
    calls = Calls.from_columns(CONV, kinds, computes, values)
    seconds = 1e-6 * np.concatenate([wide.number("latency_us"), bench.number("latency_us")])
    device = np.concatenate([number_devices(wide, ordered), number_devices(bench, ordered)])
    timed = np.arange(len(seconds)) < len(wide)
    _check(wide, bench, ordered, calls)
    shape = [calls.values[:, i] for i in range(8)] + [calls.kind.astype(np.float64)]
    nothing = np.zeros(len(seconds))
    return ConvSamples(ordered, device, calls, seconds, select_held_out(*shape), timed, nothing, nothing)


def _deepbench(data: Path) -> MeasuredTable:
    sizes = ("batch", "in_channels", "in_h", "in_w", "out_channels", "kernel_h", "kernel_w")
    table = read_table(
        data, DEEPBENCH_FILE, ("device", "op", "precision"),
        (*sizes, "pad_h", "pad_w", "stride_h", "stride_w", "latency_us"), positive=("latency_us",),
    )  # fmt: skip
    wanted = np.isin(table.text("op").astype(str), list(_KINDS))
    wanted &= np.isin(table.text("precision").astype(str), list(_COMPUTE))
    # nobody asks for the gradient of an image: such rows would only distort the fit
    wanted &= ~((table.text("op") == "conv_backward_data") & (table.number("in_channels") < 8))
    table = table.take(np.asarray(wanted, dtype=np.bool_))
    for size in (*sizes, "stride_h", "stride_w"):  # empty in rows of other ops
        check_positive(table, size)
    return table


def _columns(table: MeasuredTable, stride: tuple[str, str], pad: tuple[str, str]) -> FloatArray:
    names = ("batch", "in_channels", "out_channels", "in_h", "in_w", "kernel_h", "kernel_w", *stride, *pad)
    # no dilation, one group; copies between layouts are in what is measured; by any way, the fastest of all
    ones, zeros = np.ones(len(table)), np.zeros(len(table))
    return np.stack([*(table.number(name) for name in names), ones, ones, ones, ones, zeros, ones, ones, ones], axis=1)


def _check(wide: MeasuredTable, bench: MeasuredTable, devices: tuple[Device, ...], calls: Calls) -> None:
    """Winograd does a quarter of the GEMMs at best; nothing explains more than that."""
    start = 0
    for table in (wide, bench):
        rows = np.arange(start, start + len(table))
        part = calls.take(rows)
        products = part["batch"] * part["in_channels"] * part["out_channels"] * part["kernel_h"] * part["kernel_w"]
        outputs = part["in_h"] / part["stride_h"] * (part["in_w"] / part["stride_w"])
        index = number_devices(table, devices)
        peak = np.array([max(d.peak_flops.values()) for d in devices])[index]
        check_possible(table, 2 * products * outputs / 4 / peak, 1e-6 * table.number("latency_us"))
        start += len(table)
