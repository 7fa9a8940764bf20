"""GEMMs as other sources show them, none of which a network was fitted to: a DLRM timeline on V100, training runs on
B200, XLA on three chips, layers of experts in one call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.costs.kernels.contract import COMPUTE_BYTES, Calls, KernelCall, KernelModel, load_state
from traincast.costs.kernels.families import PROFILES, load_shipped_model
from traincast.costs.kernels.gemm import GEMM
from traincast.costs.kernels.gemm.model import GemmModel
from traincast.costs.kernels.gemm.physics import DRAM_SHARE
from traincast.hardware import Device, load_device
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.metrics import ErrorRow, compute_error_row
from traincast_evaluation.kernels.efficiency import DEVICE, convert_efficiency_to_seconds, read_efficiency
from traincast_evaluation.kernels.evaluate import summarise_samples
from traincast_evaluation.kernels.samples import Samples
from traincast_evaluation.measured_tables import (
    MeasuredTable,
    list_devices,
    number_devices,
    read_medians,
    read_table,
    reject_cells,
    select_held_out,
)

CLOCK_MHZ = 1297.0
"""The study's locked SM clock."""
_WITH_SHAPES = "2021-04-09"
_LAYOUTS = {"tn": (0, 1), "nn": (0, 0), "nt": (1, 0)}  # BLAS names, columns first: (trans_a, trans_b) rows first
_SHAPE = re.compile(r"\((\d+(?:, \d+)*),?\)")
TRAINING_SUITE = "GEMMs in training runs"
# (rows, columns, depth) of a stage's GEMM from the table's tokens M, outputs N and inputs K of an expert's layer
_STAGES = {"fwd": ("M", "N", "K"), "bwd_grad_act": ("M", "K", "N"), "bwd_grad_w": ("N", "K", "M")}
XLA_FILE = "kernels/gemm_xla.parquet"
XLA_SUITE = "gemm_xla, another library, never fitted"
_DEVICES = {"sm_90": "h100", "sm_100_B200": "b200", "gfx950": "mi355x"}
_TYPES = {"bf16": "bf16", "f16": "fp16", "f32": "tf32", "f8e4m3fn": "fp8"}
EXPERTS_FILE = "kernels/moe_mixed.parquet"
EXPERTS_SOURCE = "ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0)"
# seconds of starts, and how many times the rows of tokens pass DRAM alongside the GEMMs: sorted by expert, activated,
# weighted, put back. Pooled over H100, H200, B200, GB200; see docs/evidence/kernels.md
_STARTS = 25.6e-6
_PASSES = 3.6
_PRODUCTS = 0.88  # of the time of batched GEMMs of these sizes: one launch, tiles of all experts side by side
_GATED, _PLAIN = "moe_torch_flow_cutlass", "moe_torch_flow_nongated"  # one kernel for all experts; others are Triton's
_BALANCED = "balanced"
_JUDGED = 8  # of the balanced layers, one in this many is compared: 6,000


def evaluate_gemm_timeline(data: Path, profile: Path = PROFILES / "gemm") -> list[ErrorRow]:
    """One row: every GEMM kernel of the snapshot that recorded shapes."""
    text = ("snapshot", "kernel_name", "op_input_shapes")
    table = read_table(data, "kernels/dlrm_kernel_timeline_v100.parquet", text, ("duration_us_median",),
                       positive=("duration_us_median",), optional=("op_input_shapes",))  # fmt: skip
    chosen = [
        str(snapshot).startswith(_WITH_SHAPES) and "gemm" in str(name)
        for snapshot, name in zip(table.text("snapshot"), table.text("kernel_name"), strict=True)
    ]
    table = table.take(np.array(chosen))
    shapes = [_two_shapes(str(value)) for value in table.text("op_input_shapes")]
    odd = [row for row, pair in enumerate(shapes) if pair is None]
    reject_cells(table, "op_input_shapes", [(row, "are not the shapes of two matrices") for row in odd])
    calls = [_call(str(name), *pair) for name, pair in zip(table.text("kernel_name"), shapes, strict=True) if pair]
    measured = 1e-6 * table.number("duration_us_median")
    model = GemmModel.from_state(load_state(profile))
    estimate = model.predict(Calls.of(GEMM, calls), load_device("v100").with_clock(CLOCK_MHZ))
    names = ["x".join(f"{size:.0f}" for size in call.values[:4]) for call in calls]
    group = f"DLRM_MLPerf, V100 at {CLOCK_MHZ:.0f} MHz"
    return [compute_error_row("dlrm_kernel_timeline_v100 GEMM", group, estimate.seconds, measured, names)]


def _two_shapes(text: str) -> tuple[list[int], list[int]] | None:
    """The last two shapes of a list, where they are matrices or batches of them."""
    shapes = [[int(size) for size in shape.split(", ")] for shape in _SHAPE.findall(text)[-2:]]
    return (shapes[0], shapes[1]) if [len(shape) for shape in shapes] in ([2, 2], [3, 3]) else None


def _call(kernel: str, left: list[int], right: list[int]) -> KernelCall:
    batch = left[0] if len(left) == 3 else 1
    trans_a, trans_b = _LAYOUTS.get(kernel[-2:], (0, 0))
    return GEMM.call(
        "bmm" if len(left) == 3 else "mm", "fp32",
        batch=batch, m=left[-2], n=right[-1], k=left[-1], trans_a=trans_a, trans_b=trans_b, bias=0,
    )  # fmt: skip


def read_gemms_in_training(data: Path) -> Samples:
    """Single GEMMs, in three layouts; onto a gradient in fp32 where the result is in fp32."""
    table = read_efficiency(data, ("matmul",), ("layout", "out_dtype"), ("m", "n", "k"))
    m, n, k = (table.number(name) for name in ("m", "n", "k"))
    layout = table.text("layout").astype(str)
    # first letter: the left operand's; N is as stored by columns, so T, N is a linear layer
    values = np.stack([np.ones(len(table)), m, n, k, layout == "NT", layout == "TN", np.zeros(len(table))], axis=1)
    kinds = ["accumulate" if dtype == "fp32" else "mm" for dtype in table.text("out_dtype")]
    calls = Calls.from_columns(GEMM, kinds, ["bf16"] * len(table), values.astype(np.float64))
    apart = select_held_out(m, n, k, np.ones(len(table)))
    devices = (load_device(DEVICE),)
    return Samples(
        devices, np.zeros(len(table), dtype=np.int64), calls, convert_efficiency_to_seconds(table, 2 * m * n * k), apart
    )


def read_experts_in_training(data: Path) -> Samples:
    """Layers of experts, one GEMM after the other: forward, gradients of inputs and of weights."""
    table = read_efficiency(data, ("group_matmul",), ("stage", "main_grad_dtype"), ("ng", "M", "N", "K"))
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
    apart = select_held_out(*size.values())
    devices = (load_device(DEVICE),)
    return Samples(
        devices, np.zeros(len(table), dtype=np.int64), calls, convert_efficiency_to_seconds(table, flop), apart
    )


def evaluate_gemm_training(data: Path) -> list[ErrorRow]:
    """By kind, on shapes that set the constants and on the others; and as if kernels ran alone."""
    model = load_shipped_model("gemm")
    assert model is not None
    rows = []
    for what, samples in (("GEMMs", read_gemms_in_training(data)), ("experts", read_experts_in_training(data))):
        for kind in GEMM.kinds:
            mine = samples.calls.is_kind(kind)
            for label, part in (("shapes seen", ~samples.held_out), ("shapes never seen", samples.held_out)):
                if (mine & part).any():
                    rows.append(_row(f"b200 {what}, {kind}, {label}", samples.take(mine & part), model))
        rows.append(
            summarise_samples(
                TRAINING_SUITE,
                f"b200 {what}, at the clock of kernels timed alone",
                samples,
                model.predict,
                calibrated=False,
            )
        )
    return rows


def _row(group: str, samples: Samples, model: KernelModel) -> ErrorRow:
    return summarise_samples(
        TRAINING_SUITE, group, samples, lambda calls, device: model.predict(calls, device.with_sustained_clock())
    )


def read_xla(data: Path) -> Samples:
    """GEMMs of two operands of one type, without rows that no chip can reach and fp8 on H100, which the source has
    wrong; single precision is TF32 on NVIDIA and left out on AMD."""
    text = ("device_key", "dtype_lhs", "dtype_rhs", "exceeds_peak")
    sizes = ("batch", "m", "n", "k")
    table = read_table(data, XLA_FILE, text, (*sizes, "latency_us"), positive=(*sizes, "latency_us"))
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
    model = load_shipped_model("gemm")
    assert model is not None
    samples = read_xla(data)
    rows = []
    for index, device in enumerate(samples.devices):
        for compute in dict.fromkeys(_TYPES.values()):
            for kind in ("mm", "bmm"):
                mine = (samples.device == index) & samples.calls.is_compute(compute) & samples.calls.is_kind(kind)
                if mine.any():
                    rows.append(
                        summarise_samples(
                            XLA_SUITE, f"{device.key} {kind} {compute}", samples.take(mine), model.predict
                        )
                    )
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """Layers of experts as columns. `tokens` of all ranks go to `topk` of `experts` each, evenly; a rank holds a share
    of 1 / `ep` of the experts and of 1 / `tp` of their width `inter`. `gated` is 1 where two GEMMs meet before the
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
        item = COMPUTE_BYTES["bf16"]  # between the GEMMs
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
        data, EXPERTS_FILE, ("device", "dtype", "kernel_source", "distribution"),
        ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "tp", "ep"), "latency_us", among={},
    )  # fmt: skip
    wanted = np.isin(table.text("kernel_source").astype(str), (_GATED, _PLAIN))
    wanted &= np.asarray((table.text("dtype") == "bfloat16") & (table.text("distribution") == _BALANCED))
    chosen = np.zeros(len(table), dtype=np.bool_)
    chosen[np.flatnonzero(wanted)[::_JUDGED]] = True
    table = table.take(chosen)
    apart = select_held_out(*(table.number(name) for name in ("num_tokens", "hidden_size", "inter_size", "topk")))
    predicted = _predicted(table)
    names = table.text("device").astype(str)
    rows = []
    for device in list_devices(table):
        for label, part in (("shapes seen", ~apart), ("shapes never seen", apart)):
            mine = (names == device.name) & part
            suite = "layers of experts, one call, balanced"
            measured = 1e-6 * table.number("latency_us")[mine]
            rows.append(
                compute_error_row(suite, f"{device.key}, {label}", predicted[mine], measured, _names(table, mine))
            )
    return rows


def _predicted(table: MeasuredTable) -> FloatArray:
    model = load_shipped_model("gemm")
    assert model is not None
    devices = list_devices(table)
    number, seconds = number_devices(table, devices), np.zeros(len(table))
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
