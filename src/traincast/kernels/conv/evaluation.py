"""How well convolutions are predicted: unseen shapes, unseen GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traincast.arrays import BoolArray
from traincast.kernels.conv.fitting import fit_weights
from traincast.kernels.conv.host_delay import with_host_parts
from traincast.kernels.conv.measured import ConvRows, read_convolutions
from traincast.kernels.conv.model import ConvModel
from traincast.kernels.conv.training import predict_rows
from traincast.kernels.model import load_state
from traincast.kernels.shipped import PROFILES
from traincast.measurements.metrics import ErrorRow, error_row, within

_LONG_SECONDS = 1.5e-3  # beyond which the host's delay hardly shows


def evaluate_conv(data: Path) -> list[ErrorRow]:
    """3x3 forward (NeuSight) per device; DeepBench per direction and type; devices left out."""
    rows = read_convolutions(data)
    rows = with_host_parts(rows, ~rows.held_out)
    shipped = ConvModel.from_state(load_state(PROFILES / "conv"))
    held = rows.held_out
    table = [_row("conv 3x3 forward: shapes never seen", "all devices", rows, held & rows.event_timed, shipped)]
    long = held & rows.event_timed & (rows.seconds > _LONG_SECONDS)
    table.append(_row("conv 3x3 forward: shapes never seen", "all devices, above 1.5 ms", rows, long, shipped))
    table += _per_device("conv 3x3 forward: shapes never seen", rows, held & rows.event_timed, shipped)
    for compute in ("fp32", "fp16"):
        for kind in rows.calls.family.kinds:
            chosen = held & ~rows.event_timed & rows.calls.is_kind(kind) & rows.calls.is_compute(compute)
            table.append(_row("conv DeepBench: shapes never seen", f"{kind} {compute}", rows, chosen, shipped))
    for index, device in enumerate(rows.devices):
        twins = [i for i, d in enumerate(rows.devices) if (d.arch, d.num_sms) == (device.arch, device.num_sms)]
        others = ConvModel(fit_weights(rows.take(~held & ~np.isin(rows.device, twins)).measurements()))
        mine = held & (rows.device == index) & rows.calls.is_compute("fp32")
        table.append(
            _row("conv fp32: GPU never seen (data sheet only)", device.key, rows, mine, others, calibrated=False)
        )
    return table


def _per_device(suite: str, rows: ConvRows, chosen: BoolArray, model: ConvModel) -> list[ErrorRow]:
    return [
        _row(suite, device.key, rows, chosen & (rows.device == index), model)
        for index, device in enumerate(rows.devices)
        if (chosen & (rows.device == index)).any()
    ]


def _row(
    suite: str, group: str, rows: ConvRows, chosen: BoolArray, model: ConvModel, *, calibrated: bool = True
) -> ErrorRow:
    """`calibrated` where the spreads are: those of a model fitted for this table are not."""
    some = rows.take(chosen)
    seconds, sigma = predict_rows(model, some)
    inside = within(seconds, some.seconds, sigma) if calibrated else None
    names = ["x".join(f"{v:.0f}" for v in values[:7]) for values in some.calls.values]
    return error_row(suite, group, seconds, some.seconds, names, inside=inside)
