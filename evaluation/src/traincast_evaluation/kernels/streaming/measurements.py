"""The NeuSight vector measurements: element-wise, softmax and layer norm in fp32, with the host's part taken off.

They time one PyTorch call between two CUDA events. A short kernel hides behind the host, which gives every (device,
op) a floor; a long one starts `offset` after the first event, so that time = max(floor, offset + kernel).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.costs.kernels.contract import Calls
from traincast.costs.kernels.rowwise import NORM, SOFTMAX
from traincast.costs.kernels.streaming import ELEMENTWISE
from traincast.hardware import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast_evaluation.kernels.samples import Samples
from traincast_evaluation.measured_tables import (
    MeasuredTable,
    check_possible,
    list_devices,
    number_devices,
    read_table,
    select_held_out,
)

FILES = ("kernels/vector_fp32.parquet", "kernels/vector_amd.parquet")
SOURCE = "sitar-lab/NeuSight @ 6945927d (MIT)"
ABOVE_FLOOR = 1.3
"""A row is above the floor, and says something about its kernel, from this multiple of it."""
_TENSORS_READ = {"add": 2, "mul": 2, "div": 2, "pow": 2}  # of NeuSight's ops with two operands
_KINDS = {"addu": "add", "mulu": "mul", "divu": "div", "powu": "pow"}
_ROW_OPS = ("softmax", "ln")
_OPS = (*_TENSORS_READ, *_KINDS, "tanh", "relu", "gelu", *_ROW_OPS)
_SPLITS = ("train", "test")


@dataclass(frozen=True, eq=False, slots=True)
class VectorSamples(Samples):
    """Ops over `rows` x `cols` elements. `seconds` is what the events showed, `floor` and `offset` the host's part.

    `test` marks the split that the source set apart.
    """

    op: npt.NDArray[Any]
    rows: FloatArray
    cols: FloatArray
    test: BoolArray
    floor: FloatArray
    offset: FloatArray

    @property
    def telling(self) -> BoolArray:
        """Samples long enough to show their kernel."""
        return self.seconds > ABOVE_FLOOR * np.maximum(self.floor, 1e-9)

    @property
    def device_seconds(self) -> FloatArray:
        """Kernel time: what is left after the host's offset."""
        return np.maximum(self.seconds - self.offset, 1e-6)

    def shown(self, seconds: FloatArray, sigma: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What the events would show: never less than the host's floor."""
        return np.maximum(self.floor, self.offset + seconds), sigma

    def names(self) -> list[str]:
        """Op and size."""
        return [f"{op} {r:.0f}x{c:.0f}" for op, r, c in zip(self.op, self.rows, self.cols, strict=True)]


def _calls(op: npt.NDArray[Any], rows: FloatArray, cols: FloatArray) -> Calls:
    """Rows as kernel calls of their family; all must be of one."""
    if op[0] in _ROW_OPS:
        family, kind = (SOFTMAX, "forward") if op[0] == "softmax" else (NORM, "layer_forward")
        return Calls.from_columns(family, [kind] * len(op), ["fp32"] * len(op), np.stack([rows, cols], axis=1))
    elements = rows * cols
    reads = np.array([_TENSORS_READ.get(name, 1) for name in op], dtype=np.float64)
    values = np.stack([elements, 4 * elements * reads, 4 * elements, reads + 1], axis=1)
    kinds = [_KINDS.get(name, name) for name in op]
    return Calls.from_columns(ELEMENTWISE, kinds, ["fp32"] * len(kinds), values)


def read_vectors(data: Path, ops: str) -> VectorSamples:
    """Rows of `ops` ("elementwise", "softmax" or "ln"), offsets still zero."""
    parts = [
        read_table(data, file, ("device", "op", "split"), ("rows", "cols", "latency_us"),
                   positive=("rows", "cols", "latency_us"), among={"op": _OPS, "split": _SPLITS})
        for file in FILES
    ]  # fmt: skip
    devices = {device.key: device for part in parts for device in list_devices(part)}
    ordered = tuple(devices[key] for key in sorted(devices))
    for part in parts:
        _check(part, ordered)
    merged = MeasuredTable("vector", {n: np.concatenate([p.columns[n] for p in parts]) for n in parts[0].columns})
    wanted = merged.text("op") == ops if ops in _ROW_OPS else ~np.isin(merged.text("op").astype(str), _ROW_OPS)
    table = merged.take(np.asarray(wanted, dtype=np.bool_))
    zero = np.zeros(len(table))
    op, rows, cols = table.text("op").astype(str), table.number("rows"), table.number("cols")
    samples = VectorSamples(
        ordered,
        number_devices(table, ordered),
        _calls(op, rows, cols),
        1e-6 * table.number("latency_us"),
        select_held_out(rows, cols),
        op,
        rows,
        cols,
        np.asarray(table.text("split") == "test", dtype=np.bool_),
        zero,
        zero,
    )
    return replace(samples, floor=_floors(samples))


def _check(table: MeasuredTable, devices: tuple[Device, ...]) -> None:
    rate = np.array([device.dram_bandwidth for device in devices])[number_devices(table, devices)]
    cached = np.array([device.l2_bytes for device in devices])[number_devices(table, devices)]
    moved = np.maximum(8 * table.number("rows") * table.number("cols") - 2 * cached, 0.0)
    check_possible(table, moved / rate, 1e-6 * table.number("latency_us"))


def _floors(samples: VectorSamples) -> FloatArray:
    """The 2 % quantile of every (device, op) of the train split, which holds tiny shapes; zero without one."""
    floor = np.zeros(len(samples))
    for device in range(len(samples.devices)):
        for op in np.unique(samples.op):
            group = (samples.device == device) & (samples.op == op)
            tiny = group & ~samples.test & ~samples.held_out
            if tiny.any():
                floor[group] = np.quantile(samples.seconds[tiny], 0.02)
    return floor
