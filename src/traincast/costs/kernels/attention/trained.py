"""Attention as training runs show it: forward and backward on B200, and forward without a mask on eight GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.attention.backward import backward_features
from traincast.costs.kernels.attention.model import AttentionModel
from traincast.costs.kernels.attention.samples import AttentionSamples
from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.efficiency import DEVICE, efficiency_rows, seconds_of
from traincast.costs.kernels.solve import relative_fit, spread_90
from traincast.costs.measured_tables import device_numbers, devices_in, held_out, read_table
from traincast.hardware import load_device

ENCODER = "kernels/attention_encoder.parquet"
FRAMEWORK = "vllm"  # as for causal attention: the kernels that PyTorch also carries
_BACKWARD_FLOP = 2.5  # times the forward's, as the table counts
_SHORTEST = 16  # positions; below is decoding


def read_trained(data: Path) -> AttentionSamples:
    """Causal attention on B200, forward (never fitted) and backward; a fifth of the shapes is held out.

    The table counts the products of all pairs of positions, masked or not. Values may be narrower than keys.
    """
    numbers = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    table = efficiency_rows(data, ("sdp_fwd", "sdp_bwd"), (), numbers)
    batch, length, heads, kv_heads, dim, value_dim = (table.number(name) for name in numbers)
    backward = np.asarray(table.text("op") == "sdp_bwd")
    flop = 2.0 * batch * heads * length * length * (dim + value_dim) * np.where(backward, _BACKWARD_FLOP, 1.0)
    values = np.stack([batch, heads, kv_heads, length, length, dim, np.ones(len(table))], axis=1)
    kinds = ["backward" if flag else "forward" for flag in backward]
    calls = Calls.from_columns(ATTENTION, kinds, ["bf16"] * len(table), values)
    apart = held_out(length, heads, kv_heads, dim)
    device = np.zeros(len(table), dtype=np.int64)
    return AttentionSamples((load_device(DEVICE),), device, calls, seconds_of(table, flop), apart)


def read_encoder(data: Path) -> AttentionSamples:
    """Attention without a mask in bfloat16, forward; never fitted."""
    sizes = ("batch", "seq_len", "num_heads", "head_dim")
    table = read_table(
        data, ENCODER, ("device", "framework", "dtype"), (*sizes, "latency_us"), positive=(*sizes, "latency_us"),
        among={"dtype": ("bfloat16",)},
    )  # fmt: skip
    table = table.take(np.asarray((table.text("framework") == FRAMEWORK) & (table.number("seq_len") >= _SHORTEST)))
    batch, length, heads, dim = (table.number(name) for name in sizes)
    devices = tuple(devices_in(table))
    values = np.stack([batch, heads, heads, length, length, dim, np.zeros(len(table))], axis=1)
    calls = Calls.from_columns(ATTENTION, ["forward"] * len(table), ["bf16"] * len(table), values)
    seconds = 1e-6 * table.number("latency_us")
    apart = held_out(batch, length, heads, dim)
    return AttentionSamples(devices, device_numbers(table, devices), calls, seconds, apart)


def with_backward(model: AttentionModel, data: Path) -> AttentionModel:
    """The model with a backward fitted to the rows that are not held out, and its spread on them."""
    samples = read_trained(data)
    samples = samples.take(samples.calls.is_kind("backward") & ~samples.held_out)
    features = backward_features(samples.calls, samples.devices[0])
    weights = relative_fit(features, samples.seconds)
    return model.with_backward(weights, spread_90(features @ weights, samples.seconds))
