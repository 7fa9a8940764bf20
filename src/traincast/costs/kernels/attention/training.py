"""Fits fused attention to the prefill measurements of serving frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from traincast.costs.kernels import efficiency
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.attention.model import AttentionModel
from traincast.costs.kernels.attention.samples import AttentionSamples
from traincast.costs.kernels.attention.trained import with_backward
from traincast.costs.kernels.call import Calls
from traincast.costs.kernels.training import ModelTraining, Predictor, device_spreads, unseen_spread
from traincast.costs.measured_tables import (
    MeasuredTable,
    check_possible,
    device_numbers,
    devices_in,
    held_out,
    read_table,
)
from traincast.utils.arrays import BoolArray
from traincast.utils.errors import TraincastError

FILE = "kernels/attention_mixed.parquet"
FRAMEWORK = "vllm"  # calls the FlashAttention kernels that PyTorch also carries; the others use kernels of their own
_SHORTEST = 16  # a single query is decoding, which training never does


class AttentionTraining(ModelTraining[AttentionSamples, AttentionModel]):
    """Weights of the kernel's features, as a server's calls show them."""

    profile: ClassVar[str] = "attention"
    sources: ClassVar[tuple[str, ...]] = ("ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0)", efficiency.SOURCE)
    files: ClassVar[tuple[str, ...]] = (FILE, efficiency.FILE)

    def read(self, data: Path) -> AttentionSamples:
        """The rows of one framework, prefill only."""
        return read_attention(data)

    def fit(self, samples: AttentionSamples) -> AttentionModel:
        """The model of these samples."""
        return AttentionModel().fit(samples.measurements())

    def predictor(self, fitted: AttentionModel) -> Predictor:
        """As a server times calls."""
        return fitted.predict_served

    def calibrate(self, fitted: AttentionModel, samples: AttentionSamples, seen: BoolArray) -> AttentionModel:
        """Spreads from a fifth of the seen shapes, and from chips left out."""
        assert fitted.parameters_ is not None
        calls = samples.calls
        left_out = seen & held_out(calls["head_dim"], calls["batch"], calls["q_len"], calls["q_heads"])
        trial = self.fit(samples.take(seen & ~left_out)).predict_served
        sigma = device_spreads(samples, left_out, trial, fitted.parameters_.chips.keys)
        unseen = unseen_spread(samples, seen, seen, lambda others: self.fit(others).predict_served)
        return fitted.with_spread(sigma, unseen)

    def model(self, fitted: AttentionModel, data: Path) -> AttentionModel:
        """With the backward, from a table of its own."""
        return with_backward(fitted, data)

    def provenance(self, fitted: AttentionModel, samples: AttentionSamples) -> dict[str, Any]:
        """With the framework whose calls were taken."""
        return {**super().provenance(fitted, samples), "framework": FRAMEWORK}


TRAINING = AttentionTraining()


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
    devices = tuple(devices_in(table))
    device = device_numbers(table, devices)
    batch, length, heads, kv_heads, dim = (table.number(name) for name in sizes)
    values = np.stack([batch, heads, kv_heads, length, length, dim, np.ones(len(table))], axis=1)
    calls = Calls.from_columns(ATTENTION, ["forward"] * len(table), ["bf16"] * len(table), values)
    seconds = 1e-6 * table.number("latency_us")
    return AttentionSamples(devices, device, calls, seconds, held_out(batch, length, heads, kv_heads, dim))


def _check(table: MeasuredTable) -> None:
    """All rows, those of other frameworks too: causal products of queries, keys and values at the sheet's peak."""
    devices = devices_in(table)
    peak = np.array([device.peak("bf16") for device in devices])[device_numbers(table, devices)]
    batch, length, heads, dim = (table.number(name) for name in ("batch", "seq_len", "num_q_heads", "head_dim"))
    check_possible(table, 2 * batch * heads * length * length * dim / peak, 1e-6 * table.number("latency_us"))
