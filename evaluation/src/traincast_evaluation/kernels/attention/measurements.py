"""Measured attention: prefill of servers, training runs on B200, HSTU on H100, encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.contract import Calls
from traincast.hardware import load_device
from traincast.utils.errors import TraincastError
from traincast_evaluation.kernels.efficiency import DEVICE, convert_efficiency_to_seconds, read_efficiency
from traincast_evaluation.kernels.samples import Samples
from traincast_evaluation.measured_tables import (
    MeasuredTable,
    check_possible,
    list_devices,
    number_devices,
    read_table,
    select_held_out,
)

FILE = "kernels/attention_mixed.parquet"
FRAMEWORK = "vllm"  # calls the FlashAttention kernels that PyTorch also carries; the others use kernels of their own
_SHORTEST = 16  # a single query is decoding, which training never does
ENCODER = "kernels/attention_encoder.parquet"
POINTWISE = "kernels/hstu_attention_h100.csv"
POINTWISE_SOURCE = "NVIDIA/recsys-examples @ 43465aea (BSD-3-Clause)"
_HELD_HEADS = 8
_BACKWARD_FLOP = 2.5  # times the forward's, as the table counts


@dataclass(frozen=True, eq=False, slots=True)
class AttentionSamples(Samples):
    """Measured attention in bfloat16."""

    def names(self) -> list[str]:
        """Batch, heads of queries and keys, positions, head dimension."""
        return ["b{0:.0f} h{1:.0f}/{2:.0f} s{3:.0f} d{5:.0f}".format(*values) for values in self.calls.values]


def read_attention(data: Path) -> AttentionSamples:
    """The rows of one framework, prefill only."""
    sizes = ("batch", "seq_len", "num_q_heads", "num_kv_heads", "head_dim")
    table = read_table(
        data, FILE, ("device", "framework", "dtype"), (*sizes, "latency_us"), positive=(*sizes, "latency_us"),
        among={"dtype": ("bfloat16",)},
    )  # fmt: skip
    _check(table)
    chosen = (table.text("framework") == FRAMEWORK) & (table.number("seq_len") >= _SHORTEST)
    if not chosen.any():
        raise TraincastError(f"'{FILE}' has no rows whose 'framework' is {FRAMEWORK}")
    table = table.take(np.asarray(chosen, dtype=np.bool_))
    devices = tuple(list_devices(table))
    device = number_devices(table, devices)
    batch, length, heads, kv_heads, dim = (table.number(name) for name in sizes)
    values = np.stack([batch, heads, kv_heads, length, length, dim, np.ones(len(table))], axis=1)
    calls = Calls.from_columns(ATTENTION, ["forward"] * len(table), ["bf16"] * len(table), values)
    seconds = 1e-6 * table.number("latency_us")
    return AttentionSamples(devices, device, calls, seconds, select_held_out(batch, length, heads, kv_heads, dim))


def _check(table: MeasuredTable) -> None:
    """All rows, those of other frameworks too: causal GEMMs of queries, keys and values at the sheet's peak."""
    devices = list_devices(table)
    peak = np.array([device.get_peak_flops("bf16") for device in devices])[number_devices(table, devices)]
    batch, length, heads, dim = (table.number(name) for name in ("batch", "seq_len", "num_q_heads", "head_dim"))
    check_possible(table, 2 * batch * heads * length * length * dim / peak, 1e-6 * table.number("latency_us"))


def read_trained(data: Path) -> AttentionSamples:
    """Causal attention on B200, forward (never fitted) and backward; a fifth of the shapes is held out.

    The table counts the GEMMs of all pairs of positions, masked or not. Values may be narrower than keys.
    """
    numbers = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    table = read_efficiency(data, ("sdp_fwd", "sdp_bwd"), (), numbers)
    batch, length, heads, kv_heads, dim, value_dim = (table.number(name) for name in numbers)
    backward = np.asarray(table.text("op") == "sdp_bwd")
    flop = 2.0 * batch * heads * length * length * (dim + value_dim) * np.where(backward, _BACKWARD_FLOP, 1.0)
    values = np.stack([batch, heads, kv_heads, length, length, dim, np.ones(len(table))], axis=1)
    kinds = ["backward" if flag else "forward" for flag in backward]
    calls = Calls.from_columns(ATTENTION, kinds, ["bf16"] * len(table), values)
    apart = select_held_out(length, heads, kv_heads, dim)
    device = np.zeros(len(table), dtype=np.int64)
    return AttentionSamples((load_device(DEVICE),), device, calls, convert_efficiency_to_seconds(table, flop), apart)


def read_pointwise(data: Path) -> AttentionSamples:
    """HSTU's causal attention on H100, forward (never fitted) and backward. The rows of 8 heads are held out.

    Its scores go through SiLU where a Transformer's go through softmax: GEMMs, tiles and traffic are the same.
    """
    sizes = ("batch", "seq_len", "heads", "head_dim")
    table = read_table(
        data, POINTWISE, ("device", "direction", "dtype"), (*sizes, "latency_us"), positive=(*sizes, "latency_us"),
        among={"dtype": ("bfloat16",), "direction": ("forward", "backward", "forward_backward")},
    )  # fmt: skip
    table = table.take(np.asarray(table.text("direction") != "forward_backward", dtype=np.bool_))
    batch, length, heads, dim = (table.number(name) for name in sizes)
    devices = tuple(list_devices(table))
    values = np.stack([batch, heads, heads, length, length, dim, np.ones(len(table))], axis=1)
    calls = Calls.from_columns(ATTENTION, list(table.text("direction")), ["bf16"] * len(table), values)
    seconds = 1e-6 * table.number("latency_us")
    return AttentionSamples(devices, number_devices(table, devices), calls, seconds, heads == _HELD_HEADS)


def read_encoder(data: Path) -> AttentionSamples:
    """Attention without a mask in bfloat16, forward; never fitted."""
    sizes = ("batch", "seq_len", "num_heads", "head_dim")
    table = read_table(
        data, ENCODER, ("device", "framework", "dtype"), (*sizes, "latency_us"), positive=(*sizes, "latency_us"),
        among={"dtype": ("bfloat16",)},
    )  # fmt: skip
    table = table.take(np.asarray((table.text("framework") == FRAMEWORK) & (table.number("seq_len") >= _SHORTEST)))
    batch, length, heads, dim = (table.number(name) for name in sizes)
    devices = tuple(list_devices(table))
    values = np.stack([batch, heads, heads, length, length, dim, np.zeros(len(table))], axis=1)
    calls = Calls.from_columns(ATTENTION, ["forward"] * len(table), ["bf16"] * len(table), values)
    seconds = 1e-6 * table.number("latency_us")
    apart = select_held_out(batch, length, heads, dim)
    return AttentionSamples(devices, number_devices(table, devices), calls, seconds, apart)
