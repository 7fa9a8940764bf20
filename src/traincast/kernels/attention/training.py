"""Fits fused attention from the prefill measurements of serving frameworks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traincast.arrays import BoolArray, FloatArray
from traincast.errors import TraincastError
from traincast.kernels.attention import ATTENTION
from traincast.kernels.attention.model import AttentionModel
from traincast.kernels.call import Calls
from traincast.kernels.model import Measurements, save_state
from traincast.kernels.record import Progress
from traincast.kernels.solve import spread_90
from traincast.measurements.tables import (
    UNJUDGED_SPREAD,
    Table,
    check_possible,
    device_rows,
    devices_in,
    held_out,
    only_present,
    read_table,
)
from traincast.platform import Device
from traincast.quantiles import Z90

FILE = "kernels/attention_mixed.parquet"
SOURCE = "ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0)"
FRAMEWORK = "vllm"  # calls the FlashAttention kernels that PyTorch also carries; the others use kernels of their own
_SHORTEST = 16  # a single query is decoding, which training never does


@dataclass(frozen=True, eq=False, slots=True)
class AttentionRows:
    """Measured prefill attention, forward, causal, bfloat16."""

    devices: tuple[Device, ...]
    device: npt.NDArray[np.int64]
    calls: Calls
    seconds: FloatArray
    held_out: BoolArray

    def take(self, chosen: BoolArray) -> AttentionRows:
        """A selection, with every device kept in the list."""
        return replace(
            self,
            calls=self.calls.take(chosen),
            device=self.device[chosen],
            seconds=self.seconds[chosen],
            held_out=self.held_out[chosen],
        )

    def measurements(self) -> Measurements:
        """With the devices that are left."""
        devices, device = only_present(self.devices, self.device)
        return Measurements(self.calls, devices, device, self.seconds)


def read_attention(data: Path) -> AttentionRows:
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
    device = device_rows(table, devices)
    batch, length, heads, kv_heads, dim = (table.number(name) for name in sizes)
    values = np.stack([batch, heads, kv_heads, length, length, dim, np.ones(len(table))], axis=1)
    calls = Calls.from_columns(ATTENTION, ["forward"] * len(table), ["bf16"] * len(table), values)
    seconds = 1e-6 * table.number("latency_us")
    return AttentionRows(devices, device, calls, seconds, held_out(batch, length, heads, kv_heads, dim))


def _check(table: Table) -> None:
    """All rows, those of other frameworks too: causal products of queries, keys and values at the sheet's peak."""
    devices = devices_in(table)
    peak = np.array([device.peak("bf16") for device in devices])[device_rows(table, devices)]
    batch, length, heads, dim = (table.number(name) for name in ("batch", "seq_len", "num_q_heads", "head_dim"))
    check_possible(table, 2 * batch * heads * length * length * dim / peak, 1e-6 * table.number("latency_us"))


def predict_rows(model: AttentionModel, rows: AttentionRows) -> tuple[FloatArray, FloatArray]:
    """Seconds as the server timed them, and log-sigma, of every row."""
    seconds, sigma = np.zeros(len(rows.seconds)), np.zeros(len(rows.seconds))
    for index, device in enumerate(rows.devices):
        mine = rows.device == index
        if mine.any():
            estimate = model.predict_served(rows.calls.take(mine), device)
            seconds[mine], sigma[mine] = estimate.seconds, estimate.sigma
    return seconds, sigma


def unseen_spread(rows: AttentionRows, seen: BoolArray) -> float:
    """Log-sigma for devices never measured, from predicting each without cards of its chip."""
    shown, measured = [], []
    for index, device in enumerate(rows.devices):
        twins = [i for i, d in enumerate(rows.devices) if (d.arch, d.num_sms) == (device.arch, device.num_sms)]
        elsewhere = seen & ~np.isin(rows.device, twins)
        if not elsewhere.any():
            continue
        others = AttentionModel().fit(rows.take(elsewhere).measurements())
        mine = rows.take(seen & (rows.device == index))
        seconds, _ = predict_rows(others, mine)
        keep = slice(None, None, max(1, len(seconds) // 200))
        shown.append(seconds[keep])
        measured.append(mine.seconds[keep])
    return spread_90(np.concatenate(shown), np.concatenate(measured)) if shown else UNJUDGED_SPREAD


def fit_attention(data: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes `attention.npz` and `.json`, and returns the provenance."""
    progress("fitting attention", 0.0)
    rows = read_attention(data)
    seen = ~rows.held_out
    model = AttentionModel().fit(rows.take(seen).measurements())
    assert model.parameters_ is not None
    left_out = seen & held_out(rows.calls["head_dim"], rows.calls["batch"], rows.calls["q_len"], rows.calls["q_heads"])
    trial, _ = predict_rows(AttentionModel().fit(rows.take(seen & ~left_out).measurements()), rows)
    keys = [device.key for device in rows.devices]
    sigma = []
    for key in model.parameters_.chips.keys:
        use = left_out & (rows.device == keys.index(key))
        sigma.append(spread_90(trial[use], rows.seconds[use]))
    model = model.with_spread(np.array(sigma), unseen_spread(rows, seen))
    seconds, spread = predict_rows(model, rows)
    error, held = np.abs(seconds / rows.seconds - 1), rows.held_out
    inside = np.abs(np.log(seconds / rows.seconds)) <= Z90 * spread
    provenance = {
        "sources": [SOURCE],
        "files": [FILE],
        "framework": FRAMEWORK,
        "rows_fitted": int(seen.sum()),
        "rows_held_out": int(held.sum()),
        "mean_error_percent_fitted": 100 * float(np.mean(error[seen])),
        "mean_error_percent_held_out": 100 * float(np.mean(error[held])),
        "interval_coverage_held_out": float(np.mean(inside[held])),
        "devices": keys,
        "seed": "shape hash, see traincast.fitting.measurements.held_out",
    }
    save_state(model.state(), provenance, out / "attention")
    progress("attention done", 1.0)
    return provenance
