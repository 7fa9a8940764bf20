"""The public GEMM measurements, checked, in one shape: calls, devices, seconds, and how each was timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.gemm import GEMM
from traincast.hardware import Device
from traincast.utils.arrays import BoolArray, FloatArray, IntArray
from traincast_evaluation.kernels.samples import Measurements, Samples
from traincast_evaluation.measured_tables import (
    MeasuredTable,
    check_positive,
    check_possible,
    list_devices,
    number_devices,
    read_medians,
    read_table,
    select_held_out,
)

EDGE = 12.0
"""Sharpness of the corner between a host-bound and a device-bound measurement."""
SOURCES = {
    "neusight": "sitar-lab/NeuSight @ 6945927d (MIT)",
    "aic": "ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0)",
    "deepbench": "baidu-research/DeepBench @ da81ba78 (Apache-2.0)",
}
FILES = ("gemm_fp32", "gemm_amd", "gemm_mixed", "deepbench")
BLACKWELL_FILE = "gemm_mixed_blackwell"
"""Measured later: its devices get codes, its types networks of their own (`blackwell`)."""
_PRECISIONS = {"fp32": "fp32", "fp16_tensor_core": "fp16", "bfloat16": "bf16", "fp8": "fp8"}
_BLACKWELL_TYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "fp4"}


def as_timed(seconds: FloatArray, floor: FloatArray, offset: FloatArray) -> FloatArray:
    """What a stopwatch shows for a kernel of `seconds`: never less than the host's `floor`, and `offset` on top."""
    shown = offset + seconds
    ratio = np.minimum(floor, shown) / np.maximum(floor, shown)
    return np.asarray(np.maximum(floor, shown) * (1.0 + ratio**EDGE) ** (1.0 / EDGE))


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """How each measurement was timed: rows of `group` share a host floor and an offset, in seconds (see
    `as_timed`). Zero floor and offset: the kernel alone. `weight` is how much a measurement counts."""

    group: IntArray
    floor: FloatArray
    offset: FloatArray
    weight: FloatArray

    @staticmethod
    def none(n: int) -> Stopwatch:
        """Measurements of kernels alone."""
        return Stopwatch(np.zeros(n, dtype=np.int64), np.zeros(1), np.zeros(1), np.ones(n))

    def shown(self, seconds: FloatArray, rows: IntArray) -> FloatArray:
        """What it shows for kernels of these measurements."""
        group = self.group[rows]
        return as_timed(seconds, np.maximum(self.floor[group], 1e-9), np.maximum(self.offset[group], 1e-9))


@dataclass(frozen=True, eq=False, slots=True)
class GemmSamples(Samples):
    """Measured GEMMs of one `source`. `seconds` is what the stopwatch of `machine` (source/device/op) showed; `test`
    marks those that the source set apart."""

    machine: npt.NDArray[Any]
    test: BoolArray

    @property
    def source(self) -> str:
        """Where they come from, a key of `SOURCES`."""
        return str(self.machine[0]).partition("/")[0]

    def device_names(self) -> npt.NDArray[Any]:
        """The device of every sample, as PyTorch calls it."""
        return np.array([device.name for device in self.devices])[self.device]

    def names(self) -> list[str]:
        """Batch and sizes."""
        return ["x".join(f"{size:.0f}" for size in call) for call in self.calls.values[:, :4]]


def read_gemm(data: Path, file: str) -> GemmSamples:
    """One of `FILES`, or `BLACKWELL_FILE`. A missing column, a number not above 0, an impossible time is an error."""
    readers = {"gemm_mixed": _read_mixed, "deepbench": _read_deepbench, BLACKWELL_FILE: _read_blackwell}
    return readers[file](data) if file in readers else _read_neusight(data, f"kernels/{file}.parquet")


def kernels_run(data: Path) -> npt.NDArray[Any]:
    """The name of the main kernel of every row of `gemm_fp32`, in the order of `read_gemm`."""
    return read_table(data, "kernels/gemm_fp32.parquet", ("kernel_name",), ()).text("kernel_name")


def _read_neusight(data: Path, file: str) -> GemmSamples:
    sizes = ("batch", "m", "n", "k")
    table = read_table(
        data, file, ("device", "op", "split"), (*sizes, "latency_us"), positive=(*sizes, "latency_us"),
        among={"op": ("linear", "bmm"), "split": ("train", "test")},
    )  # fmt: skip
    linear = table.text("op") == "linear"
    values = np.stack([*(table.number(name) for name in sizes), 0.0 * linear, linear, linear], axis=1)
    test = np.asarray(table.text("split") == "test", dtype=np.bool_)
    return _samples("neusight", table, [str(op) for op in table.text("op")], ["fp32"] * len(table), values, test)


def _read_mixed(data: Path) -> GemmSamples:
    """The three frameworks call one library on the same shape: their median stands for it."""
    table = read_table(
        data, "kernels/gemm_mixed.parquet", ("device", "dtype"), ("m", "n", "k", "latency_us"),
        positive=("m", "n", "k", "latency_us"), among={"dtype": ("bfloat16", "fp8")},
    )  # fmt: skip
    types = np.where(table.text("dtype") == "fp8", "fp8", "bf16")
    _check(table, types, *(table.number(size) for size in ("m", "n", "k")))  # a median would hide a single bad row
    names, device = np.unique(table.text("device").astype(str), return_inverse=True)
    fp8 = np.asarray(table.text("dtype") == "fp8").astype(np.float64)
    shape = np.stack([device.astype(np.float64), fp8, table.number("m"), table.number("n"), table.number("k")])
    order = np.lexsort((table.number("latency_us"), *shape[::-1]))
    shape, latency = shape[:, order], table.number("latency_us")[order]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(shape, axis=1) != 0).any(axis=0)]))
    count = np.diff(np.concatenate([first, [len(latency)]]))
    median = 0.5 * (latency[first + (count - 1) // 2] + latency[first + count // 2])
    shape = shape[:, first]
    merged = MeasuredTable(table.file, {"device": names[shape[0].astype(int)].astype(object), "latency_us": median})
    one, zero = np.ones(len(median)), np.zeros(len(median))
    values = np.stack([one, shape[2], shape[3], shape[4], zero, one, zero], axis=1)
    compute = ["fp8" if flag else "bf16" for flag in shape[1]]
    return _samples("aic", merged, ["mm"] * len(median), compute, values, zero.astype(np.bool_))


def _read_blackwell(data: Path) -> GemmSamples:
    """Three frameworks, of which some lack a type or a shape; their median, as of the other table.

    vllm's times of block-scaled fp8 are 300 to 900 us at every size: its host's launch.
    """
    table = read_medians(
        data, f"kernels/{BLACKWELL_FILE}.parquet", ("device", "dtype"), ("m", "n", "k"), "latency_us",
        among={"dtype": _BLACKWELL_TYPES}, without={"framework": "vllm", "dtype": "fp8_block"},
    )  # fmt: skip
    compute = [_BLACKWELL_TYPES[name] for name in table.text("dtype")]
    sizes = [table.number(size) for size in ("m", "n", "k")]
    _check(table, np.array(compute), *sizes)
    one, zero = np.ones(len(table)), np.zeros(len(table))
    values = np.stack([one, *sizes, zero, one, zero], axis=1)
    return _samples("aic", table, ["mm"] * len(table), compute, values, zero.astype(np.bool_))


def _read_deepbench(data: Path) -> GemmSamples:
    """DeepBench stores columns first, so its m and n, and its operands, change places. It pads the operands of tensor
    cores to multiples of 8."""
    file = "kernels/deepbench.parquet"
    table = read_table(
        data, file, ("device", "op", "precision"), ("m", "n", "k", "trans_a", "trans_b", "latency_us"),
        positive=("latency_us",),
    )  # fmt: skip
    gemms = (table.text("op") == "gemm") & np.isin(table.text("precision").astype(str), list(_PRECISIONS))
    table = table.take(np.asarray(gemms, dtype=np.bool_))
    for size in ("m", "n", "k"):
        check_positive(table, size)
    values = np.stack(
        [np.ones(len(table)), *(table.number(name) for name in ("n", "m", "k", "trans_b", "trans_a")),
         np.zeros(len(table))], axis=1,
    )  # fmt: skip
    compute = [_PRECISIONS[str(name)] for name in table.text("precision")]
    padded = np.array([name == "fp16" for name in compute])
    values[padded, 1:4] = 8.0 * np.ceil(values[padded, 1:4] / 8.0)
    return _samples("deepbench", table, ["mm"] * len(table), compute, values, np.zeros(len(table), dtype=np.bool_))


def _samples(
    source: str, table: MeasuredTable, kinds: Sequence[str], compute: Sequence[str], values: FloatArray, test: BoolArray
) -> GemmSamples:
    devices = tuple(list_devices(table))
    device = number_devices(table, devices)
    seconds = 1e-6 * table.number("latency_us")
    batch, m, n, k = values[:, :4].T
    if source != "aic":  # checked row by row before they were merged
        _check(table, np.array(compute), batch, m, n, k)
    machine = np.array([f"{source}/{devices[i].key}/{kind}" for i, kind in zip(device, kinds, strict=True)])
    calls = Calls.from_columns(GEMM, kinds, compute, values)
    return GemmSamples(devices, device, calls, seconds, select_held_out(batch, m, n, k), machine, test)


def _check(table: MeasuredTable, compute: npt.NDArray[Any], *sizes: FloatArray) -> None:
    """Rejects rows faster than three times the sheet's peak."""
    devices = list_devices(table)
    device = number_devices(table, devices)
    peak = np.zeros(len(table))
    for name in np.unique(compute):
        chosen = compute == name
        peak[chosen] = np.array([_peak(card, str(name)) for card in devices])[device[chosen]]
    flop = 2 * np.prod(np.stack(sizes), axis=0)
    check_possible(table, flop / peak, 1e-6 * table.number("latency_us"))


def _peak(device: Device, compute: str) -> float:
    return max(device.get_peak_flops(compute), device.get_peak_flops("fp32_matrix") if compute == "fp32" else 0.0)


def join_samples(parts: Sequence[GemmSamples]) -> Measurements:
    """Several tables as one set of measurements, devices ordered by key."""
    devices = {device.key: device for part in parts for device in part.devices}
    ordered = [devices[key] for key in sorted(devices)]
    place = {device.key: i for i, device in enumerate(ordered)}
    device = [np.array([place[d.key] for d in part.devices], dtype=np.int64)[part.device] for part in parts]
    calls = [part.calls for part in parts]
    return Measurements(
        Calls(
            GEMM,
            np.concatenate([c.kind for c in calls]),
            np.concatenate([c.compute for c in calls]),
            np.concatenate([c.values for c in calls]),
        ),
        ordered,
        np.concatenate(device),
        np.concatenate([part.seconds for part in parts]),
    )
