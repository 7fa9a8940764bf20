"""Matrix products as XLA runs them on H100, B200 and the MI350 series: another library's choices, never fitted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.evaluation import samples_row
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.samples import Samples
from traincast.costs.kernels.shipped import shipped_model
from traincast.costs.measured_tables import read_table
from traincast.hardware import load_device
from traincast.utils.metrics import ErrorRow

FILE = "kernels/gemm_xla.parquet"
SUITE = "gemm_xla, another library, never fitted"
_DEVICES = {"sm_90": "h100", "sm_100_B200": "b200", "gfx950": "mi355x"}
_TYPES = {"bf16": "bf16", "f16": "fp16", "f32": "tf32", "f8e4m3fn": "fp8"}


def read_xla(data: Path) -> Samples:
    """Products of two operands of one type, without rows that no chip can reach and fp8 on H100, which the source has
    wrong; single precision is TF32 on NVIDIA and left out on AMD."""
    text = ("device_key", "dtype_lhs", "dtype_rhs", "exceeds_peak")
    sizes = ("batch", "m", "n", "k")
    table = read_table(data, FILE, text, (*sizes, "latency_us"), positive=(*sizes, "latency_us"))
    left = table.text("dtype_lhs").astype(str)
    chip = table.text("device_key").astype(str)
    use = (left == table.text("dtype_rhs").astype(str)) & np.isin(left, list(_TYPES)) & np.isin(chip, list(_DEVICES))
    use &= np.array([flag in (False, "false") for flag in table.text("exceeds_peak")])
    use &= ~((chip == "sm_90") & (left == "f8e4m3fn")) & ~((chip == "gfx950") & (left != "bf16"))
    table = table.take(use)
    devices = tuple(load_device(key) for key in _DEVICES.values())
    number = np.array([list(_DEVICES).index(name) for name in table.text("device_key")], dtype=np.int64)
    zero = np.zeros(len(table))
    values = np.column_stack([*(table.number(name) for name in sizes), zero, zero + 1.0, zero])
    kinds = ["bmm" if batch > 1 else "mm" for batch in table.number("batch")]
    calls = Calls.from_columns(GEMM, kinds, [_TYPES[name] for name in table.text("dtype_lhs")], values)
    seconds = 1e-6 * table.number("latency_us")
    return Samples(devices, number, calls, seconds, np.ones(len(table), dtype=np.bool_))


def evaluate_gemm_xla(data: Path) -> list[ErrorRow]:
    """By device, type, and single or batched."""
    model = shipped_model("gemm")
    assert model is not None
    samples = read_xla(data)
    rows = []
    for index, device in enumerate(samples.devices):
        for compute in dict.fromkeys(_TYPES.values()):
            for kind in ("mm", "bmm"):
                mine = (samples.device == index) & samples.calls.is_compute(compute) & samples.calls.is_kind(kind)
                if mine.any():
                    rows.append(samples_row(SUITE, f"{device.key} {kind} {compute}", samples.take(mine), model.predict))
    return rows
