"""How well fused attention is predicted: unseen shapes, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.arrays import BoolArray
from traincast.kernels.attention.model import AttentionModel
from traincast.kernels.attention.training import AttentionRows, predict_rows, read_attention
from traincast.kernels.model import load_state
from traincast.kernels.shipped import PROFILES
from traincast.measurements.metrics import ErrorRow, error_row, within


def evaluate_attention(data: Path) -> list[ErrorRow]:
    """Causal prefill in bfloat16, per device, and every device from the others."""
    rows = read_attention(data)
    shipped = AttentionModel.from_state(load_state(PROFILES / "attention"))
    table = []
    for index, device in enumerate(rows.devices):
        mine = rows.held_out & (rows.device == index)
        table.append(_row("attention forward: shapes never seen", device.key, rows, mine, shipped))
    for index, device in enumerate(rows.devices):
        twins = [i for i, d in enumerate(rows.devices) if (d.arch, d.num_sms) == (device.arch, device.num_sms)]
        others = AttentionModel().fit(rows.take(~rows.held_out & ~np.isin(rows.device, twins)).measurements())
        mine = rows.held_out & (rows.device == index)
        table.append(
            _row(
                "attention forward: GPU never seen (data sheet only)", device.key, rows, mine, others, calibrated=False
            )
        )
    return table


def _row(
    suite: str, group: str, rows: AttentionRows, chosen: BoolArray, model: AttentionModel, *, calibrated: bool = True
) -> ErrorRow:
    """`calibrated` where the spreads are: those of a model fitted for this table are not."""
    some = rows.take(chosen)
    seconds, sigma = predict_rows(model, some)
    inside = within(seconds, some.seconds, sigma) if calibrated else None
    names = ["b{0:.0f} h{1:.0f}/{2:.0f} s{3:.0f} d{5:.0f}".format(*values) for values in some.calls.values]
    return error_row(suite, group, seconds, some.seconds, names, inside=inside)
