"""Matrix products as training runs on B200 show them: layouts, sums onto gradients, experts. Nothing is fitted to them
but two constants (`variants`, the sheet's `loaded_clock_mhz`), on the shapes that are not held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.efficiency import DEVICE, efficiency_rows, seconds_of
from traincast.costs.kernels.evaluation import samples_row
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.model import KernelModel
from traincast.costs.kernels.samples import Samples
from traincast.costs.kernels.shipped import shipped_model
from traincast.costs.measured_tables import held_out
from traincast.hardware import load_device
from traincast.utils.metrics import ErrorRow

SUITE = "matrix products in training runs"
# (rows, columns, depth) of a stage's product from the table's tokens M, outputs N and inputs K of an expert's layer
_STAGES = {"fwd": ("M", "N", "K"), "bwd_grad_act": ("M", "K", "N"), "bwd_grad_w": ("N", "K", "M")}


def read_products(data: Path) -> Samples:
    """Single products, in three layouts; onto a gradient in fp32 where the result is in fp32."""
    table = efficiency_rows(data, ("matmul",), ("layout", "out_dtype"), ("m", "n", "k"))
    m, n, k = (table.number(name) for name in ("m", "n", "k"))
    layout = table.text("layout").astype(str)
    # first letter: the left operand's; N is as stored by columns, so T, N is a linear layer
    values = np.stack([np.ones(len(table)), m, n, k, layout == "NT", layout == "TN", np.zeros(len(table))], axis=1)
    kinds = ["accumulate" if dtype == "fp32" else "mm" for dtype in table.text("out_dtype")]
    calls = Calls.from_columns(GEMM, kinds, ["bf16"] * len(table), values.astype(np.float64))
    apart = held_out(m, n, k, np.ones(len(table)))
    devices = (load_device(DEVICE),)
    return Samples(devices, np.zeros(len(table), dtype=np.int64), calls, seconds_of(table, 2 * m * n * k), apart)


def read_experts(data: Path) -> Samples:
    """Layers of experts, one product after the other: forward, gradients of inputs and of weights."""
    table = efficiency_rows(data, ("group_matmul",), ("stage", "main_grad_dtype"), ("ng", "M", "N", "K"))
    size = {name: table.number(name) for name in ("ng", "M", "N", "K")}
    stages = [str(stage) for stage in table.text("stage")]
    zero = np.zeros(len(table))
    triples = [[size[name][row] for name in _STAGES[stage]] for row, stage in enumerate(stages)]
    values = np.column_stack([size["ng"], np.array(triples), zero, zero + 1, zero])
    onto = [
        stage == "bwd_grad_w" and dtype == "fp32"
        for stage, dtype in zip(stages, table.text("main_grad_dtype"), strict=True)
    ]
    kinds = ["looped_accumulate" if flag else "looped" for flag in onto]
    calls = Calls.from_columns(GEMM, kinds, ["bf16"] * len(table), values)
    flop = 2 * size["ng"] * size["M"] * size["N"] * size["K"]
    apart = held_out(*size.values())
    devices = (load_device(DEVICE),)
    return Samples(devices, np.zeros(len(table), dtype=np.int64), calls, seconds_of(table, flop), apart)


def evaluate_gemm_training(data: Path) -> list[ErrorRow]:
    """By kind, on shapes that set the constants and on the others; and as if kernels ran alone."""
    model = shipped_model("gemm")
    assert model is not None
    rows = []
    for what, samples in (("products", read_products(data)), ("experts", read_experts(data))):
        for kind in GEMM.kinds:
            mine = samples.calls.is_kind(kind)
            for label, part in (("shapes seen", ~samples.held_out), ("shapes never seen", samples.held_out)):
                if (mine & part).any():
                    rows.append(_row(f"b200 {what}, {kind}, {label}", samples.take(mine & part), model))
        rows.append(
            samples_row(
                SUITE, f"b200 {what}, at the clock of kernels timed alone", samples, model.predict, calibrated=False
            )
        )
    return rows


def _row(group: str, samples: Samples, model: KernelModel) -> ErrorRow:
    return samples_row(SUITE, group, samples, lambda calls, device: model.predict(calls, device.under_load()))
