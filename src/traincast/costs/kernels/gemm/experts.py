"""A layer of experts in one call, as servers run it forward: routing done, two grouped products and the activation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.costs.kernels.call import COMPUTE_BYTES, Calls
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.gemm.engine import DRAM_SHARE
from traincast.costs.kernels.model import KernelModel
from traincast.costs.kernels.shipped import shipped_model
from traincast.costs.measured_tables import MeasuredTable, device_numbers, devices_in, held_out, read_medians
from traincast.hardware import Device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.metrics import ErrorRow, error_row

FILE = "kernels/moe_mixed.parquet"
SOURCE = "ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0)"
# seconds of starts, and how many times the rows of tokens pass DRAM beside the products: sorted by expert, activated,
# weighted, put back. Pooled over H100, H200, B200, GB200; see docs/evidence/kernels.md
_STARTS = 25.6e-6
_PASSES = 3.6
_PRODUCTS = 0.88  # of the time of batched products of these sizes: one launch, tiles of all experts side by side
_GATED, _PLAIN = "moe_torch_flow_cutlass", "moe_torch_flow_nongated"  # one kernel for all experts; others are Triton's
_BALANCED = "balanced"
_JUDGED = 8  # of the balanced layers, one in so many is compared: 6,000


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """Layers of experts as columns. `tokens` of all ranks go to `topk` of `experts` each, evenly; a rank holds a share
    of 1 / `ep` of the experts and of 1 / `tp` of their width `inter`. `gated` is 1 where two products meet before the
    activation (SwiGLU)."""

    tokens: FloatArray
    hidden: FloatArray
    inter: FloatArray
    topk: FloatArray
    experts: FloatArray
    tp: FloatArray
    ep: FloatArray
    gated: FloatArray

    def seconds(self, model: KernelModel, device: Device, compute: str) -> FloatArray:
        """Device time of the forward of each layer on one rank."""
        held, width = np.maximum(self.experts / self.ep, 1.0), np.maximum(self.inter / self.tp, 1.0)
        rows = self.tokens * self.topk / self.ep
        busy = np.maximum(np.minimum(held, rows), 1.0)  # an expert without a token costs nothing
        each = np.maximum(np.ceil(rows / busy), 1.0)
        first = _grouped(model, device, compute, busy, each, width * (1.0 + self.gated), self.hidden)
        second = _grouped(model, device, compute, busy, each, self.hidden, width)
        item = COMPUTE_BYTES["bf16"]  # between the products
        moved = rows * item * (width * (2.0 + self.gated) + 2.0 * self.hidden)
        passes = _PASSES * moved / (DRAM_SHARE * device.dram_bandwidth)
        return np.asarray(_STARTS + _PRODUCTS * (first + second) + passes)


def _grouped(
    model: KernelModel, device: Device, compute: str, groups: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray
) -> FloatArray:
    zero = np.zeros(len(m))
    values = np.stack([groups, m, n, k, zero, zero + 1.0, zero], axis=1)
    calls = Calls.from_columns(GEMM, ["grouped"] * len(m), [compute] * len(m), values)
    return model.predict(calls, device).seconds


def evaluate_experts(data: Path) -> list[ErrorRow]:
    """Fused layers in bfloat16, tokens spread evenly, by device: shapes that set the constants, and the others."""
    table = read_medians(
        data, FILE, ("device", "dtype", "kernel_source", "distribution"),
        ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "tp", "ep"), "latency_us", among={},
    )  # fmt: skip
    wanted = np.isin(table.text("kernel_source").astype(str), (_GATED, _PLAIN))
    wanted &= np.asarray((table.text("dtype") == "bfloat16") & (table.text("distribution") == _BALANCED))
    chosen = np.zeros(len(table), dtype=np.bool_)
    chosen[np.flatnonzero(wanted)[::_JUDGED]] = True
    table = table.take(chosen)
    apart = held_out(*(table.number(name) for name in ("num_tokens", "hidden_size", "inter_size", "topk")))
    predicted = _predicted(table)
    names = table.text("device").astype(str)
    rows = []
    for device in devices_in(table):
        for label, part in (("shapes seen", ~apart), ("shapes never seen", apart)):
            mine = (names == device.name) & part
            suite = "layers of experts, one call, balanced"
            measured = 1e-6 * table.number("latency_us")[mine]
            rows.append(error_row(suite, f"{device.key}, {label}", predicted[mine], measured, _names(table, mine)))
    return rows


def _predicted(table: MeasuredTable) -> FloatArray:
    model = shipped_model("gemm")
    assert model is not None
    devices = devices_in(table)
    number, seconds = device_numbers(table, devices), np.zeros(len(table))
    for index, device in enumerate(devices):
        mine = number == index
        part = table.take(mine)
        layer = ExpertLayer(
            tokens=part.number("num_tokens"), hidden=part.number("hidden_size"), inter=part.number("inter_size"),
            topk=part.number("topk"), experts=part.number("num_experts"), tp=part.number("tp"), ep=part.number("ep"),
            gated=np.asarray(part.text("kernel_source") == _GATED).astype(np.float64),
        )  # fmt: skip
        seconds[mine] = layer.seconds(model, device, "bf16")
    return seconds


def _names(table: MeasuredTable, mine: BoolArray) -> list[str]:
    columns = [table.number(name)[mine] for name in ("num_tokens", "hidden_size", "inter_size", "num_experts", "ep")]
    return ["t{:.0f} h{:.0f} f{:.0f} e{:.0f} ep{:.0f}".format(*row) for row in zip(*columns, strict=True)]
